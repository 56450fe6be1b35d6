"""SentencePiece's unigram model: the segmentation with the highest sum of scores (Kudo 2018)."""

from __future__ import annotations

from array import array
from sys import byteorder
from typing import Final

from kvern.errors import FileFormatError
from kvern.text.bpe import SPACE_MARK, byte_token_value
from kvern.text.vocabulary import TokenType, Vocabulary

_UNKNOWN_PENALTY: Final = 10.0
_OUTSIDE: Final = "tokenizer.ggml.precompiled_charsmap points outside itself"


class CharacterMap:
    """SentencePiece's precompiled normalisation: the longest known prefix is replaced.

    The blob is a little-endian length, a double-array trie of that many bytes (Kanda 2018), and
    the replacements, each ended by a zero byte.

    Raises:
        FileFormatError: the blob is truncated.
    """

    def __init__(self, blob: bytes) -> None:
        size = int.from_bytes(blob[:4], "little") if len(blob) >= 4 else 0
        if size == 0 or size % 4 or 4 + size >= len(blob):
            raise FileFormatError(
                f"tokenizer.ggml.precompiled_charsmap is damaged: a trie of {size:,} bytes "
                f"in {len(blob):,} bytes"
            )
        self._units = array("I", blob[4 : 4 + size])
        if byteorder == "big":
            self._units.byteswap()
        self._replacements = blob[4 + size :]

    def normalize(self, text: bytes) -> bytes:
        """The text with every longest known prefix replaced, from left to right."""
        result = bytearray()
        position = 0
        while position < len(text):
            length, replacement = self._longest_prefix(text, position)
            if length == 0:
                length = _character_length(text, position)
                replacement = text[position : position + length]
            result += replacement
            position += length
        return bytes(result)

    def _longest_prefix(self, text: bytes, start: int) -> tuple[int, bytes]:
        units = self._units
        length, value = 0, 0
        node = _base(units[0])
        for position in range(start, len(text)):
            byte = text[position]
            node ^= byte
            if byte == 0 or node >= len(units) or units[node] & 0x800000FF != byte:
                break
            unit = units[node]
            node ^= _base(unit)
            if unit & 0x100:
                if node >= len(units):
                    raise FileFormatError(_OUTSIDE)
                length, value = position - start + 1, units[node] & 0x7FFFFFFF
        if length == 0:
            return 0, b""
        end = self._replacements.find(b"\0", value)
        if end < 0:
            raise FileFormatError(_OUTSIDE)
        return length, self._replacements[value:end]


def _base(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _character_length(text: bytes, position: int) -> int:
    first = text[position]
    return 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


class UnigramEncoder:
    """Encodes pieces of text that hold no special tokens.

    Args:
        vocabulary: pieces with log-probabilities as scores.
        charsmap: SentencePiece's precompiled normalisation, or None.
        add_space_prefix: the text starts with a space that is not in it.
        remove_extra_whitespaces: spaces at both ends go, runs of spaces become one.

    Raises:
        FileFormatError: no scores, no unknown token, or a damaged normalisation.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        charsmap: bytes | None,
        add_space_prefix: bool,
        remove_extra_whitespaces: bool,
    ) -> None:
        if not vocabulary.scores or vocabulary.unk_id is None:
            raise FileFormatError("a unigram vocabulary needs scores and an unknown token")
        self._vocabulary = vocabulary
        self._unk_id = vocabulary.unk_id
        self._charsmap = CharacterMap(charsmap) if charsmap else None
        self._add_space_prefix = add_space_prefix
        self._remove_extra_whitespaces = remove_extra_whitespaces
        self._pieces: dict[str, tuple[int, float]] = {}
        self._byte_ids: dict[int, int] = {}
        lowest = float("inf")
        for token_id, token in enumerate(vocabulary.tokens):
            kind, score = vocabulary.types[token_id], vocabulary.scores[token_id]
            if kind == TokenType.NORMAL:
                lowest = min(lowest, score)
                self._pieces[token] = (token_id, score)
            elif kind == TokenType.USER_DEFINED:
                self._pieces[token] = (token_id, 0.0)
            elif kind == TokenType.UNUSED:
                self._pieces[token] = (token_id, score)
            elif kind == TokenType.BYTE:
                value = byte_token_value(token)
                if value is not None:
                    self._byte_ids[value] = token_id
        if not self._pieces:
            raise FileFormatError("a unigram vocabulary without a single normal piece")
        self._unknown_score = lowest - _UNKNOWN_PENALTY
        self._longest = max(map(len, self._pieces))

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text."""
        normalized = self._normalize(text)
        ids: list[int] = []
        for token_id, piece in self._best_path(normalized):
            if token_id != self._unk_id:
                ids.append(token_id)
            elif len(self._byte_ids) == 256:
                ids.extend(self._byte_ids[byte] for byte in piece.encode())
            elif not ids or ids[-1] != self._unk_id:
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
        if first and (self._add_space_prefix or self._remove_extra_whitespaces):
            text = text.removeprefix(" ")
        return text.encode()

    def _normalize(self, text: str) -> str:
        if self._charsmap is not None:
            text = self._charsmap.normalize(text.encode()).decode(errors="replace")
        if self._remove_extra_whitespaces:
            words = [word for word in text.split(" ") if word]
            return "".join(SPACE_MARK + word for word in words)
        if self._add_space_prefix:
            stripped = text.lstrip(" ")
            if stripped:
                text = text[: len(text) - len(stripped)] + " " + stripped
        return text.replace(" ", SPACE_MARK)

    def _best_path(self, text: str) -> list[tuple[int, str]]:
        """The best segmentation as (token id, piece of text) pairs (Viterbi)."""
        size = len(text)
        best_score = [0.0] + [float("-inf")] * size
        best_start = [0] * (size + 1)
        best_id = [self._unk_id] * (size + 1)
        pieces = self._pieces
        for start in range(size):
            score_so_far = best_score[start]
            for end in range(start + 1, min(start + self._longest, size) + 1):
                piece = pieces.get(text[start:end])
                if piece is None:
                    continue
                token_id, score = piece
                if score_so_far + score > best_score[end]:
                    best_score[end] = score_so_far + score
                    best_start[end], best_id[end] = start, token_id
            if text[start] not in pieces:
                score = score_so_far + self._unknown_score
                if score > best_score[start + 1]:
                    best_score[start + 1] = score
                    best_start[start + 1], best_id[start + 1] = start, self._unk_id
        path: list[tuple[int, str]] = []
        end = size
        while end > 0:
            path.append((best_id[end], text[best_start[end] : end]))
            end = best_start[end]
        path.reverse()
        return path
