"""What a tokenizer is made of, whichever kind of file it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The tokens with a task of their own.

    Attributes:
        bos_id, eos_id: begin and end of sequence, None where the model has none.
        end_ids: every id that ends a generation.
        add_bos, add_eos: whether `encode` adds them by default.
        texts: the texts that chat templates refer to (`bos_token`, `eos_token`, ...).
    """

    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    texts: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """A vocabulary with its algorithm."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""

    @property
    def special(self) -> SpecialIds:
        """The named special tokens."""

    @property
    def has_token_bytes(self) -> bool:
        """Whether a text is the concatenation of its tokens' bytes."""

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Token ids of a text, which holds no lone surrogate."""

    def is_special(self, token_id: int) -> bool:
        """Whether a token is left out of an answer's text."""

    def token_bytes(self, token_id: int, *, first: bool) -> bytes:
        """What a token adds to a text; `first`: no other token of the text stands before it."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text, for backends without `token_bytes`."""
