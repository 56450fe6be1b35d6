"""How a stream is stored: a format is data, and one function gives its bytes.

A `Codec` describes the stored form of one stream. `regions` is the layout: packed elements first,
then scales, then zero points, each in C order.

    axis    group   one scale serves                          scales of [heads, tokens, dim]
    token   0       one vector: a token and head              [heads, tokens]
    token   g       g channels of one token and head          [heads, tokens, ceil(dim / g)]
    channel g       g tokens of one channel and head          [heads, ceil(tokens / g), dim]

Per-channel groups of tokens exist only in whole: `token_group` is the number of tokens that are
quantised together, and a block's size must be a multiple of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvern.errors import UsageError
from kvern.spec.content import DTYPE_BITS

AXES = ("token", "channel")


@dataclass(frozen=True, slots=True)
class Region:
    """A run of bytes inside a stored stream: "data", "scale" or "zero_point".

    `shape` counts elements of `dtype`; the last dimension of sub-byte data is packed, each row
    rounded up to whole bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, int, int]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Codec:
    """The stored form of one stream.

    Attributes:
        dtype: element type, a key of `DTYPE_BITS`.
        group: elements along `axis` that share a scale; 0 = the whole vector (axis "token" only).
        axis: what a scale runs along: "token" = channels of one token, "channel" = tokens of one
            channel (KIVI, arXiv:2402.02750).
        zero_point: whether a minimum of the scale's dtype is stored beside each scale.
        scale: dtype of the scales; None = elements carry no scale (floats, plain fp8).
        rotate: whether vectors are rotated (Hadamard) before they are stored (QuaRot,
            arXiv:2404.00456); costs no bytes.
    """

    dtype: str
    group: int = 0
    axis: str = "token"
    zero_point: bool = False
    scale: str | None = None
    rotate: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise ValueError(
                f"unknown element dtype {self.dtype!r}; known: {', '.join(DTYPE_BITS)}"
            )
        if self.scale is not None and self.scale not in DTYPE_BITS:
            raise ValueError(f"unknown scale dtype {self.scale!r}; known: {', '.join(DTYPE_BITS)}")
        if self.axis not in AXES:
            raise ValueError(f"unknown axis {self.axis!r}; known: {', '.join(AXES)}")
        if self.group < 0 or (self.axis == "channel" and self.group == 0):
            raise ValueError(f"group {self.group} is not possible along axis {self.axis!r}")
        if self.zero_point and self.scale is None:
            raise ValueError("a zero point needs a scale dtype")

    @property
    def bits(self) -> int:
        """Bits of one stored element, scales not counted."""
        return DTYPE_BITS[self.dtype]

    @property
    def is_wide(self) -> bool:
        """Whether a sealed block equals its open form bit for bit (fp32, fp16, bf16)."""
        return self.bits >= 16

    @property
    def token_group(self) -> int:
        """How many tokens are quantised together: 1 unless scales run along tokens."""
        return self.group if self.axis == "channel" else 1

    def regions(self, num_tokens: int, num_heads: int, dim: int) -> tuple[Region, ...]:
        """Layout of a stored stream `[num_heads, num_tokens, dim]`, without gaps."""
        data_bytes = num_heads * num_tokens * -(-dim * self.bits // 8)
        regions = [Region("data", self.dtype, (num_heads, num_tokens, dim), 0, data_bytes)]
        if self.scale is not None:
            if self.axis == "channel":
                shape = (num_heads, -(-num_tokens // self.group), dim)
            else:
                shape = (num_heads, num_tokens, -(-dim // self.group) if self.group else 1)
            num_bytes = shape[0] * shape[1] * shape[2] * DTYPE_BITS[self.scale] // 8
            regions.append(Region("scale", self.scale, shape, data_bytes, num_bytes))
            if self.zero_point:
                offset = data_bytes + num_bytes
                regions.append(Region("zero_point", self.scale, shape, offset, num_bytes))
        return tuple(regions)

    def stored_bytes(self, num_tokens: int, num_heads: int, dim: int) -> int:
        """Exact bytes of `num_tokens` vectors per head, scales and zero points included."""
        last = self.regions(num_tokens, num_heads, dim)[-1]
        return last.offset + last.num_bytes


FP32 = Codec("fp32")
FP16 = Codec("fp16")
BF16 = Codec("bf16")
FP8 = Codec("fp8_e4m3")
INT8 = Codec("int8", scale="fp32")
INT4 = Codec("int4", group=32, zero_point=True, scale="fp16")

KV_FORMATS: Mapping[str, tuple[Codec, Codec]] = MappingProxyType(
    {
        "fp32": (FP32, FP32),
        "fp16": (FP16, FP16),
        "bf16": (BF16, BF16),
        "fp8": (FP8, FP8),
        "int8": (INT8, INT8),
        "int4": (INT4, INT4),
        "k8v4": (INT8, INT4),
        "kivi4": (
            Codec("int4", group=32, axis="channel", zero_point=True, scale="fp16"),
            Codec("int4", group=32, zero_point=True, scale="fp16"),
        ),
        "kivi2": (
            Codec("int2", group=32, axis="channel", zero_point=True, scale="fp16"),
            Codec("int2", group=32, zero_point=True, scale="fp16"),
        ),
    }
)
"""Named formats: (key codec, value codec)."""

STORED_CODECS = frozenset({FP32, FP16, BF16, INT8})
"""What the engine stores; everything else can be planned only."""


def stored_formats() -> tuple[str, ...]:
    """Names of the formats that the engine stores."""
    return tuple(name for name, pair in KV_FORMATS.items() if STORED_CODECS.issuperset(pair))


def format_name(codec: Codec) -> str:
    """The first format that a codec belongs to, for messages; its dtype where it belongs to none."""
    return next((name for name, pair in KV_FORMATS.items() if codec in pair), codec.dtype)


def parse_kv_format(kv_format: str, num_layers: int) -> tuple[tuple[Codec, Codec], ...]:
    """Codecs of every layer for a format name or a per-layer mix.

    A mix is `NAME;LAYERS=NAME;...`, later parts winning: `"int8;0-1,29=bf16"` stores layers 0, 1
    and 29 in bf16 and the rest in int8.

    Raises:
        UsageError: unknown format name, or layers that the model does not have.
    """
    default, *exceptions = kv_format.split(";")
    codecs = [_preset(default)] * num_layers
    for exception in exceptions:
        layers, separator, name = exception.partition("=")
        if not separator:
            raise UsageError(f"KV format part {exception!r} is not of the form LAYERS=NAME")
        for index in _parse_layers(layers, num_layers):
            codecs[index] = _preset(name)
    return tuple(codecs)


def _preset(name: str) -> tuple[Codec, Codec]:
    try:
        return KV_FORMATS[name.strip()]
    except KeyError:
        known = ", ".join(KV_FORMATS)
        raise UsageError(f"unknown KV format {name.strip()!r}: choose one of {known}") from None


def _parse_layers(text: str, num_layers: int) -> list[int]:
    layers: list[int] = []
    for part in text.split(","):
        first, separator, last = part.strip().partition("-")
        try:
            start = int(first)
            stop = int(last) if separator else start
        except ValueError:
            raise UsageError(f"{part.strip()!r} is not a layer number or range like 0-3") from None
        if not 0 <= start <= stop < num_layers:
            raise UsageError(f"layers {part.strip()} do not exist: the model has {num_layers}")
        layers.extend(range(start, stop + 1))
    return layers
