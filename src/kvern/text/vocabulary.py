"""The tokens of a GGUF file: their texts, types and scores, and what the special ones are for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from kvern.errors import FileFormatError

PREFIX: Final = "tokenizer.ggml."

# Texts that end a turn or a generation wherever they appear as a token of their own, whatever
# type the converter gave them.
_END_TEXTS: Final = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
        "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
        "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
        "<｜end▁of▁sentence｜>", "[e~[",
    }
)  # fmt: skip
# Ends a generation only where the file itself says that it is a control token: in some
# vocabularies it is an ordinary tag.
_END_TEXTS_IF_CONTROL: Final = frozenset({"</s>"})


class TokenType(IntEnum):
    """What a token is, in GGUF's numbering."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of a GGUF file.

    Attributes:
        tokens: text of every token id, as the file spells it.
        ids: token id of every text.
        types: type of every token id (`TokenType` values).
        scores: score of every token id; empty where the file has none.
        special: ids of control and unknown tokens; their text is not part of an answer.
        user_defined: ids of tokens that are found in a text before anything else.
        end_ids: ids that end a generation.
        bos_id, eos_id, unk_id, pad_id: the named tokens, None where there is none.
    """

    tokens: Sequence[str]
    ids: Mapping[str, int]
    types: Sequence[int]
    scores: Sequence[float]
    special: frozenset[int]
    user_defined: frozenset[int]
    end_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None


@dataclass(frozen=True, slots=True)
class NamedIds:
    """The ids that a tokenizer model uses where the file names none."""

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    pad: int | None = None


def read_array(metadata: Mapping[str, Any], key: str) -> list[Any]:
    """The array under a key as a list; empty where the key is missing.

    Raises:
        FileFormatError: the value is not an array.
    """
    value = metadata.get(PREFIX + key)
    if value is None:
        return []
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise FileFormatError(f"{PREFIX}{key} is {type(value).__name__}, and must be an array")
    return list(value)


def read_flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """The boolean under a key, or the default where the key is missing."""
    value = metadata.get(PREFIX + key)
    return default if value is None else bool(value)


def read_vocabulary(metadata: Mapping[str, Any], defaults: NamedIds) -> Vocabulary:
    """Reads the vocabulary from GGUF metadata.

    Raises:
        FileFormatError: no tokens, a token twice, arrays of unequal length, an id out of range.
    """
    tokens = _named_tokens(read_array(metadata, "tokens"))
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        raise FileFormatError(_name_duplicate(tokens))
    types = _per_token(metadata, "token_type", len(tokens)) or [int(TokenType.NORMAL)] * len(tokens)
    scores = _per_token(metadata, "scores", len(tokens))
    bos_id = _named_id(metadata, "bos", defaults.bos, len(tokens))
    eos_id = _named_id(metadata, "eos", defaults.eos, len(tokens))
    end_ids = _end_ids(metadata, ids, types, eos_id)
    for token_id in end_ids:
        if types[token_id] in (TokenType.NORMAL, TokenType.USER_DEFINED):
            types[token_id] = int(TokenType.CONTROL)
    special_types = (int(TokenType.CONTROL), int(TokenType.UNKNOWN))
    return Vocabulary(
        tokens=tokens,
        ids=ids,
        types=types,
        scores=scores,
        special=frozenset(i for i, kind in enumerate(types) if kind in special_types),
        user_defined=frozenset(i for i, kind in enumerate(types) if kind == 4),
        end_ids=end_ids,
        bos_id=bos_id,
        eos_id=eos_id,
        unk_id=_named_id(metadata, "unknown", defaults.unk, len(tokens)),
        pad_id=_named_id(metadata, "padding", defaults.pad, len(tokens)),
    )


def _named_tokens(tokens: list[Any]) -> list[str]:
    if not tokens:
        raise FileFormatError(f"the file holds no vocabulary ({PREFIX}tokens is missing or empty)")
    if not all(tokens):
        return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    return tokens


def _name_duplicate(tokens: Sequence[str]) -> str:
    seen: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if token in seen:
            return f"the vocabulary holds {token!r} twice, as ids {seen[token]} and {token_id}"
        seen[token] = token_id
    return "the vocabulary holds a token twice"


def _per_token(metadata: Mapping[str, Any], key: str, num_tokens: int) -> list[Any]:
    values = read_array(metadata, key)
    if values and len(values) < num_tokens:
        raise FileFormatError(
            f"{PREFIX}{key} has {len(values):,} values for {num_tokens:,} tokens: "
            "the file is damaged or was converted wrongly"
        )
    return values[:num_tokens]


def _named_id(
    metadata: Mapping[str, Any], name: str, default: int | None, num_tokens: int
) -> int | None:
    value = metadata.get(f"{PREFIX}{name}_token_id")
    if value is None:
        return default if default is not None and default < num_tokens else None
    if not 0 <= value < num_tokens:
        raise FileFormatError(
            f"{PREFIX}{name}_token_id is {value}, and the vocabulary has {num_tokens:,} tokens"
        )
    return int(value)


def _end_ids(
    metadata: Mapping[str, Any], ids: Mapping[str, int], types: Sequence[int], eos_id: int | None
) -> frozenset[int]:
    """End of sequence, of turn and of message, named by the file or known by their text."""
    found = {
        _named_id(metadata, "eot", None, len(ids)),
        _named_id(metadata, "eom", None, len(ids)),
        eos_id,
    }
    found.update(ids[text] for text in _END_TEXTS if text in ids)
    found.update(
        ids[text]
        for text in _END_TEXTS_IF_CONTROL
        if text in ids and types[ids[text]] == TokenType.CONTROL
    )
    # Where a call or a return ends the turn, <|end|> only ends one of its messages.
    has_call = "<|call|>" in ids or "<|calls|>" in ids
    if has_call and ("<|return|>" in ids or "<|flush|>" in ids) and ids.get("<|end|>") != eos_id:
        found.discard(ids.get("<|end|>"))
    return frozenset(token_id for token_id in found if token_id is not None)
