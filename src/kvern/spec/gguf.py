"""GGUF header reader (versions 2 and 3), without dependencies and without reading the weights.

The file is memory-mapped. Metadata arrays (a vocabulary has 50,000 to 260,000 strings) are checked
and skipped, and decoded on first use. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    "GGUF" | version | num_tensors | num_metadata | metadata ... | tensor infos ... | padding | data

Nothing in the file is trusted: every length is compared with the bytes that are left before it is
used, and every tensor must lie inside the data without touching another.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, overload

from kvern.errors import FileFormatError, ModelError
from kvern.spec.tensors import TensorInfo, check_placement

GGML_TYPES: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 40),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
    }
)
"""Tensor types: number -> (name, elements per block, bytes per block)."""

MAX_DIMS = 4
MAX_KEY_BYTES = 65_535
MAX_ARRAY_DEPTH = 4
DEFAULT_ALIGNMENT = 32

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class GGUFArray(Sequence[Any]):
    """A metadata array, decoded on first use: numbers, booleans, strings or further arrays."""

    __slots__ = ("_decoded", "_length", "_reader", "_start", "_stop", "_type")

    def __init__(self, reader: _Reader, type_number: int, length: int, start: int) -> None:
        self._reader = reader
        self._type = type_number
        self._length = length
        self._start = start
        self._stop = reader.position
        self._decoded: list[Any] | None = None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.to_list()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_list())

    def __repr__(self) -> str:
        return f"GGUFArray of {self._length} elements"

    @property
    def raw(self) -> bytes:
        """The stored bytes: little-endian numbers, or length-prefixed strings."""
        return self._reader.data[self._start : self._stop]

    def to_list(self) -> list[Any]:
        """All elements; decoded once and kept.

        Raises:
            FileFormatError: a string is not UTF-8.
        """
        if self._decoded is None:
            if self._type == _STRING:
                self._decoded = self._strings()
            elif self._type == _ARRAY:
                reader = _Reader(self._reader.path, self._reader.data, self._start)
                self._decoded = [reader.array(1) for _ in range(self._length)]
            else:
                code = _SCALARS[self._type].format[1:]
                self._decoded = list(struct.unpack(f"<{self._length}{code}", self.raw))
        return self._decoded

    def _strings(self) -> list[str]:
        raw, unpack, position = self.raw, _U64.unpack_from, 0
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(self._length):
                start = position + 8
                position = start + unpack(raw, position)[0]
                append(raw[start:position].decode())
        except UnicodeDecodeError:
            self._reader.refuse(f"string {len(strings)} of a metadata array is not UTF-8")
        return strings


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything a GGUF file says before its weights.

    Attributes:
        path: the file.
        version: 2 or 3.
        metadata: key -> number, bool, str or lazily decoded `GGUFArray`.
        tensors: name -> `TensorInfo`, in file order.
        data_offset: file position that tensor offsets count from.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data_offset: int

    @property
    def architecture(self) -> str:
        """`general.architecture`.

        Raises:
            FileFormatError: the file does not name one.
        """
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise FileFormatError(f"{self.path}: general.architecture is missing")
        return architecture

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors together."""
        return sum(info.num_elements for info in self.tensors.values())


def is_gguf(path: str | Path) -> bool:
    """Whether a file starts with the GGUF magic."""
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def read_header(path: str | Path) -> GGUFHeader:
    """Read and check a GGUF file's header; the weights are not touched.

    Raises:
        ModelError: the file cannot be opened.
        FileFormatError: not GGUF, truncated, or damaged in any way that can be seen.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise FileFormatError(f"{path} is not a GGUF file: it starts with {magic!r}")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    reader = _Reader(path, data, 4)
    version = reader.number(_U32)
    if version not in (2, 3):
        hint = " (big-endian)" if version in (2 << 24, 3 << 24) else ""
        reader.refuse(f"GGUF version {version}{hint} is not supported: 2 and 3 are")
    num_tensors = reader.count("tensors", _MIN_TENSOR_BYTES)
    num_metadata = reader.count("metadata entries", _MIN_METADATA_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = reader.name("metadata key")
        if key in metadata:
            reader.refuse(f"metadata key {key} appears twice")
        metadata[key] = reader.value(reader.number(_U32))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        reader.refuse(f"general.alignment is {alignment}: it must be a multiple of 8")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        info = reader.tensor_info(alignment)
        if info.name in tensors:
            reader.refuse(f"tensor {info.name} appears twice")
        tensors[info.name] = info
    data_offset = -(-reader.position // alignment) * alignment
    check_placement(path, tensors.values(), max(len(data) - data_offset, 0))
    return GGUFHeader(
        path, version, MappingProxyType(metadata), MappingProxyType(tensors), data_offset
    )


class _Reader:
    """A cursor over the mapped file that refuses to run past its end."""

    __slots__ = ("data", "path", "position", "size")

    def __init__(self, path: Path, data: mmap.mmap, position: int) -> None:
        self.path = path
        self.data = data
        self.position = position
        self.size = len(data)

    def refuse(self, reason: str) -> NoReturn:
        """Raise the one error of this module, with the file's name."""
        raise FileFormatError(f"{self.path}: {reason}")

    def require(self, num_bytes: int, what: str) -> int:
        """Claim `num_bytes` and return where they start."""
        start = self.position
        if num_bytes > self.size - start:
            self.refuse(
                f"{what} at byte {start:,} needs {num_bytes:,} bytes and the file ends after "
                f"{self.size - start:,}: it is truncated or damaged, fetch it again"
            )
        self.position = start + num_bytes
        return start

    def number(self, kind: struct.Struct) -> Any:
        """One number of the header's own structure or of the metadata."""
        return kind.unpack_from(self.data, self.require(kind.size, "a number"))[0]

    def count(self, what: str, min_bytes: int) -> int:
        """A 64-bit count of things that take at least `min_bytes` each."""
        count: int = self.number(_U64)
        if count * min_bytes > self.size - self.position:
            self.refuse(
                f"{count:,} {what} cannot lie in the {self.size:,} bytes of the file: "
                "it is truncated or damaged, fetch it again"
            )
        return count

    def string(self, what: str) -> str:
        """A length-prefixed UTF-8 string."""
        length = self.number(_U64)
        start = self.require(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            self.refuse(f"{what} at byte {start:,} is not UTF-8")

    def name(self, what: str) -> str:
        """A string that names something: not empty and of sensible length."""
        start = self.position
        name = self.string(what)
        if not 0 < len(name) <= MAX_KEY_BYTES:
            self.refuse(f"{what} at byte {start:,} has {len(name):,} characters")
        return name

    def value(self, type_number: int) -> Any:
        """One metadata value of the given type."""
        if type_number == _STRING:
            return self.string("a metadata string")
        if type_number == _ARRAY:
            return self.array(1)
        kind = _SCALARS.get(type_number)
        if kind is None:
            self.refuse(f"metadata type {type_number} at byte {self.position:,} is unknown")
        if type_number == _BOOL:
            return self._bool()
        return self.number(kind)

    def array(self, depth: int) -> GGUFArray:
        """Check and skip an array."""
        if depth > MAX_ARRAY_DEPTH:
            self.refuse(f"a metadata array is nested more than {MAX_ARRAY_DEPTH} deep")
        type_number = self.number(_U32)
        if type_number == _STRING:
            length = self.count("strings", 8)
            start = self.position
            self._skip_strings(length)
        elif type_number == _ARRAY:
            length = self.count("arrays", 12)
            start = self.position
            for _ in range(length):
                self.array(depth + 1)
        else:
            kind = _SCALARS.get(type_number)
            if kind is None:
                self.refuse(f"array type {type_number} at byte {self.position:,} is unknown")
            length = self.count("numbers", kind.size)
            start = self.require(length * kind.size, "a metadata array")
        return GGUFArray(self, type_number, length, start)

    def tensor_info(self, alignment: int) -> TensorInfo:
        """One entry of the tensor table."""
        name = self.name("tensor name")
        num_dims = self.number(_U32)
        if not 1 <= num_dims <= MAX_DIMS:
            self.refuse(f"tensor {name} has {num_dims} dimensions: 1 to {MAX_DIMS} are possible")
        dims = [self.number(_U64) for _ in range(num_dims)]
        type_number = self.number(_U32)
        offset = self.number(_U64)
        if type_number not in GGML_TYPES:
            self.refuse(f"tensor {name} has the unknown type {type_number}")
        type_name, block_elements, block_bytes = GGML_TYPES[type_number]
        num_elements = prod(dims)
        if not 0 < num_elements < 2**63:
            self.refuse(f"tensor {name} has the impossible shape {dims}")
        if dims[0] % block_elements:
            self.refuse(
                f"tensor {name}: rows of {dims[0]:,} elements are no whole number of {type_name} "
                f"blocks of {block_elements}"
            )
        if offset % alignment:
            self.refuse(f"tensor {name} starts at {offset:,}, which is not aligned to {alignment}")
        nbytes = num_elements // block_elements * block_bytes
        return TensorInfo(name, type_name, tuple(reversed(dims)), offset, nbytes)

    def _bool(self) -> bool:
        byte = self.number(_SCALARS[0])
        if byte > 1:
            self.refuse(f"a boolean at byte {self.position - 1:,} has the value {byte}")
        return bool(byte)

    def _skip_strings(self, count: int) -> None:
        data, unpack, position, size = self.data, _U64.unpack_from, self.position, self.size
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError):
            position = size + 1
        if position > size:
            self.refuse(f"an array of {count:,} strings runs past the file's end: fetch it again")
        self.position = position
