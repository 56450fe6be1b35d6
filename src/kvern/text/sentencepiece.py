"""SentencePiece's byte-pair encoding, from the pieces and scores of a GGUF file.

Any two neighbouring symbols whose concatenation is a piece may merge; the pair whose piece has the
highest score goes first, the leftmost of equals. `tokenizers` knows ranked merges only: deriving
them costs more than a second for Gemma's 262,144 pieces at every start, and pieces of equal score
have no right order. So the algorithm is implemented here (Sennrich et al. 2016; Kudo and
Richardson 2018), with a cache of words, since merges hardly ever cross a word's border.
"""

from __future__ import annotations

import re
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Final

from kvern.errors import FileFormatError
from kvern.text.bpe import SPACE_MARK, byte_token_value
from kvern.text.vocabulary import TokenType, Vocabulary

_CACHED_WORDS: Final = 16_384
_LONGEST_CACHED_WORD: Final = 64
_SPACE_RUNS: Final = re.compile(" {2,}")
# Control and byte tokens are never spelled out by a text; they have ways of their own.
_NOT_MERGEABLE: Final = frozenset((TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE))


class SentencePieceEncoder:
    """Encodes pieces of text that hold no special tokens.

    Args:
        vocabulary: pieces with scores.
        add_space_prefix: every piece of text starts with a space that is not in the text.
        remove_extra_whitespaces: spaces at both ends go, runs of spaces become one.

    Raises:
        FileFormatError: the pieces have no scores, or the vocabulary can neither spell out bytes
            nor name an unknown token.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, add_space_prefix: bool, remove_extra_whitespaces: bool
    ) -> None:
        if not vocabulary.scores:
            raise FileFormatError("a SentencePiece vocabulary needs tokenizer.ggml.scores")
        self._vocabulary = vocabulary
        self._add_space_prefix = add_space_prefix
        self._remove_extra_whitespaces = remove_extra_whitespaces
        self._scores = vocabulary.scores
        self._ids = dict(vocabulary.ids)
        bytes_found: dict[int, int] = {}
        for token_id, kind in enumerate(vocabulary.types):
            if kind in _NOT_MERGEABLE:
                del self._ids[vocabulary.tokens[token_id]]
                if kind == TokenType.BYTE:
                    value = byte_token_value(vocabulary.tokens[token_id])
                    if value is not None:
                        bytes_found[value] = token_id
        self._byte_ids = bytes_found
        if len(bytes_found) < 256 and vocabulary.unk_id is None:
            raise FileFormatError(
                f"the vocabulary has {len(bytes_found)} of 256 byte tokens and no unknown token: "
                "it cannot represent every text"
            )
        self._word_start = _word_start(vocabulary)
        self._encode_word = lru_cache(_CACHED_WORDS)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text."""
        if self._remove_extra_whitespaces:
            text = _SPACE_RUNS.sub(" ", text.strip(" "))
        if not text:
            return []
        if self._add_space_prefix:
            text = f" {text}"
        ids: list[int] = []
        unk_id = self._vocabulary.unk_id
        for word in self._word_start.split(text.replace(" ", SPACE_MARK)):
            encode = self._encode_word if len(word) <= _LONGEST_CACHED_WORD else self._merge
            for token_id in encode(word):
                if token_id != unk_id or not ids or ids[-1] != unk_id:
                    ids.append(token_id)  # neighbouring unknown characters are one unknown token
        return ids

    def token_bytes(self, token_id: int, first: bool) -> bytes:
        """What a token that is neither special nor user-defined adds to a text."""
        token = self._vocabulary.tokens[token_id]
        if self._vocabulary.types[token_id] == TokenType.BYTE:
            value = byte_token_value(token)
            if value is not None:
                return bytes([value])
        text = token.replace(SPACE_MARK, " ")
        if first and self._add_space_prefix:
            text = text.removeprefix(" ")
        return text.encode()

    def _merge(self, word: str) -> tuple[int, ...]:
        symbols: list[str | None] = list(word)
        count = len(symbols)
        following = list(range(1, count + 1))
        preceding = list(range(-1, count - 1))
        ids, scores = self._ids, self._scores
        queue = []
        for left in range(count - 1):
            pair = word[left : left + 2]
            if pair in ids:
                queue.append((-scores[ids[pair]], left, left + 1, pair))
        heapify(queue)
        while queue:
            _, left, right, merged = heappop(queue)
            left_text, right_text = symbols[left], symbols[right]
            if left_text is None or right_text is None or left_text + right_text != merged:
                continue  # one of the two has merged with another symbol since
            symbols[left], symbols[right] = merged, None
            after = following[right]
            following[left] = after
            if after < count:
                preceding[after] = left
                pair = merged + (symbols[after] or "")
                if pair in ids:
                    heappush(queue, (-scores[ids[pair]], left, after, pair))
            before = preceding[left]
            if before >= 0:
                pair = (symbols[before] or "") + merged
                if pair in ids:
                    heappush(queue, (-scores[ids[pair]], before, left, pair))
        result: list[int] = []
        for symbol in symbols:
            if symbol is not None:
                token_id = ids.get(symbol)
                result.extend(self._spell(symbol) if token_id is None else (token_id,))
        return tuple(result)

    def _spell(self, character: str) -> list[int]:
        """A character that is no piece, as byte tokens or else as the unknown token."""
        spelled = [self._byte_ids.get(byte) for byte in character.encode()]
        known = [token_id for token_id in spelled if token_id is not None]
        if len(known) == len(spelled) or self._vocabulary.unk_id is None:
            return known
        return [self._vocabulary.unk_id]


def _word_start(vocabulary: Vocabulary) -> re.Pattern[str]:
    """Matches the empty string at borders that no merge can cross.

    Such a border lies before a space mark, behind a character that no piece has before a mark.
    """
    joined = "\uffff".join(vocabulary.tokens)
    joiners = set(re.findall(f"([^{SPACE_MARK}\uffff]){SPACE_MARK}", joined)) | {SPACE_MARK}
    excluded = "".join(map(re.escape, sorted(joiners)))
    return re.compile(f"(?<=[^{excluded}])(?={SPACE_MARK})")
