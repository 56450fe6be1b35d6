"""Byte-pair encoding from GGUF metadata, on the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvern.errors import FileFormatError
from kvern.text.pretokenizers import PreTokenizer
from kvern.text.vocabulary import TokenType, Vocabulary

SPACE_MARK: Final = "\u2581"
_NEWLINES: Final = re.compile(r"(\n+)")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte, as a table from character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


BYTE_OF_CHARACTER: Final = _byte_of_character()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a text that is not written byte-level stands for itself."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def byte_token_value(token: str) -> int | None:
    """The byte that a token such as `<0x0A>` stands for, or None."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


class BytePairEncoder:
    """Encodes pieces of text that hold no special tokens.

    Args:
        vocabulary: the tokens.
        merges: pairs in order of priority, each "left right".
        pre_tokenizer: how a text is cut into words first.

    Raises:
        FileFormatError: a merge names a token that the vocabulary lacks.
    """

    def __init__(
        self, vocabulary: Vocabulary, merges: Sequence[str], pre_tokenizer: PreTokenizer
    ) -> None:
        self._vocabulary = vocabulary
        self._byte_level = pre_tokenizer.byte_level
        try:
            model = models.BPE(
                vocab=dict(vocabulary.ids),
                merges=[_pair(merge) for merge in merges],
                ignore_merges=pre_tokenizer.ignore_merges,
                byte_fallback=not self._byte_level,
            )
        except Exception as error:  # the library raises nothing more specific
            raise FileFormatError(
                f"the merges do not fit the vocabulary of {len(vocabulary.tokens):,} tokens: "
                f"{error}"
            ) from error
        self._tokenizer = Tokenizer(model)
        splits: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            for pattern in pre_tokenizer.patterns
        ]
        if self._byte_level:
            splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        else:
            self._tokenizer.normalizer = normalizers.Replace(" ", SPACE_MARK)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text."""
        if self._byte_level or "\n" not in text:
            return self._ids_of(text)
        # A run of newlines that is a token is that token, whatever merges would give.
        ids: list[int] = []
        for part in _NEWLINES.split(text):
            newlines = self._vocabulary.ids.get(part) if part.startswith("\n") else None
            if newlines is not None:
                ids.append(newlines)
            elif part:
                ids.extend(self._ids_of(part))
        return ids

    def token_bytes(self, token_id: int, first: bool) -> bytes:
        """What a token that is neither special nor user-defined adds to a text."""
        del first
        token = self._vocabulary.tokens[token_id]
        if self._byte_level:
            return byte_level_bytes(token)
        if self._vocabulary.types[token_id] == TokenType.BYTE:
            value = byte_token_value(token)
            if value is not None:
                return bytes([value])
        return token.replace(SPACE_MARK, " ").encode()

    def _ids_of(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not left:  # the left token is itself a space
        left, space, right = merge[0], merge[1:2], merge[2:]
    if not space or not right:
        raise ValueError(f"{merge!r} is not a pair of tokens")
    return left, right
