"""What one layer leaves behind in the cache: the *content* half of content x reach.

A content answers two questions and nothing else: which streams a token writes (`streams`) and how
many bytes exist whatever the length (`fixed_bytes`). It knows no dtype of the token streams; that
is the codec's business (`kvern.spec.codec`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

DTYPE_BITS = {
    "fp32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "int8": 8,
    "int4": 4,
    "int2": 2,
}


@dataclass(frozen=True, slots=True)
class Stream:
    """One run of vectors that every token (or every `stride` tokens) appends to.

    Attributes:
        name: "key", "value", "latent" or "index".
        num_heads: vectors per entry.
        dim: elements per vector.
        is_value: whether the value codec applies; every other stream follows the key codec.
    """

    name: str
    num_heads: int
    dim: int
    is_value: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """Keys and values per KV head: MHA, GQA and MQA differ only in `num_kv_heads`."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        _require_positive(self, "num_kv_heads", "key_dim", "value_dim")

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Keys first, then values."""
        return (
            Stream("key", self.num_kv_heads, self.key_dim),
            Stream("value", self.num_kv_heads, self.value_dim, is_value=True),
        )

    @property
    def fixed_bytes(self) -> int:
        """Always 0: heads grow with the sequence."""
        return 0


@dataclass(frozen=True, slots=True)
class Latent:
    """One compressed vector and one rotary key, shared by all query heads (MLA, absorbed).

    The rotary part lies behind the latent in the same vector, so that a score is one dot product
    of `latent_dim + rope_dim` elements (DeepSeek-V2, arXiv:2405.04434, section 2.1).
    """

    latent_dim: int
    rope_dim: int

    def __post_init__(self) -> None:
        _require_positive(self, "latent_dim")
        if self.rope_dim < 0:
            raise ValueError(f"rope_dim is {self.rope_dim}: it must not be negative")

    @property
    def streams(self) -> tuple[Stream, ...]:
        """A single stream: the latent is key and value at once."""
        return (Stream("latent", 1, self.latent_dim + self.rope_dim),)

    @property
    def fixed_bytes(self) -> int:
        """Always 0: latents grow with the sequence."""
        return 0


@dataclass(frozen=True, slots=True)
class Index:
    """The index key of sparse attention: one vector per entry that only selects tokens."""

    dim: int

    def __post_init__(self) -> None:
        _require_positive(self, "dim")

    @property
    def streams(self) -> tuple[Stream, ...]:
        """A single stream of index keys."""
        return (Stream("index", 1, self.dim),)

    @property
    def fixed_bytes(self) -> int:
        """Always 0: index keys grow with the sequence."""
        return 0


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a recurrent state, of fixed shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise ValueError(f"state part {self.name}: unknown dtype {self.dtype!r}")
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"state part {self.name}: shape {self.shape} must be positive")

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class State:
    """A fixed-size summary of everything before: linear attention, Mamba, short convolution."""

    parts: tuple[StatePart, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a state needs at least one part")

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Always empty: a token leaves nothing of its own behind."""
        return ()

    @property
    def fixed_bytes(self) -> int:
        """Bytes of one state, whatever the length."""
        return sum(part.num_bytes for part in self.parts)


Content = Heads | Latent | State | Index


def _require_positive(content: Content, *names: str) -> None:
    for name in names:
        value = getattr(content, name)
        if value < 1:
            raise ValueError(f"{type(content).__name__}.{name} is {value}: it must be positive")
