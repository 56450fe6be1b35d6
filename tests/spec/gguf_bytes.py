"""A GGUF writer that can also write what no sane tool would."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

SCALAR_CODES = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content) -> bytes:
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        element, items = content
        return struct.pack("<IQ", element, len(items)) + b"".join(value(element, i) for i in items)
    return struct.pack("<" + SCALAR_CODES[kind], content)


@dataclass
class Tensor:
    """Dimensions fastest first, as the file has them."""

    name: str
    dims: tuple[int, ...]
    type: int
    offset: int


@dataclass
class GGUF:
    metadata: list[tuple[str, int, object]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    num_tensors: int | None = None
    num_metadata: int | None = None

    def to_bytes(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_metadata = len(self.metadata) if self.num_metadata is None else self.num_metadata
        out = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_metadata)
        for key, kind, content in self.metadata:
            out += string(key) + struct.pack("<I", kind) + value(kind, content)
        for tensor in self.tensors:
            out += string(tensor.name) + struct.pack("<I", len(tensor.dims))
            out += struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims)
            out += struct.pack("<IQ", tensor.type, tensor.offset)
        out += b"\0" * (-len(out) % self.alignment)
        return out + self.data


def sample() -> GGUF:
    """A small file with every metadata type, three tensors and a padded header."""
    return GGUF(
        metadata=[
            ("general.architecture", STRING, "llama"),
            ("llama.block_count", U32, 2),
            ("llama.rope.freq_base", F32, 10000.0),
            ("tokenizer.ggml.add_bos_token", BOOL, True),
            ("tokenizer.ggml.tokens", ARRAY, (STRING, ["<s>", "", "é", "日本", "\n"])),
            ("tokenizer.ggml.token_type", ARRAY, (5, [3, 1, -1, 1, 6])),
            ("some.flags", ARRAY, (BOOL, [True, False])),
            ("some.nested", ARRAY, (ARRAY, [(U8, [1, 2]), (STRING, ["a"]), (F32, [])])),
            ("some.big", U64, 2**63 + 1),
        ],
        tensors=[
            Tensor("token_embd.weight", (32, 5), 8, 0),
            Tensor("blk.0.attn_norm.weight", (4,), 0, 192),
            Tensor("output.weight", (64, 2), 2, 224),
        ],
        data=bytes(range(192)) + b"\1" * 32 + b"\2" * 72,
    )
