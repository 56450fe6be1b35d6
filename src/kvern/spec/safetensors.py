"""Safetensors header reader: one file, or the shards that an index names.

Layout: 8 bytes of header length, a JSON header, then the tensors without gaps
(https://github.com/huggingface/safetensors). The weights are not touched.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvern.errors import FileFormatError, ModelError
from kvern.spec.tensors import TensorInfo, check_placement

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "U16": 16,
        "I16": 16,
        "F16": 16,
        "BF16": 16,
        "U32": 32,
        "I32": 32,
        "F32": 32,
        "U64": 64,
        "I64": 64,
        "F64": 64,
        "C64": 64,
    }
)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What one file holds.

    Attributes:
        path: the file.
        metadata: the free strings under `__metadata__`.
        tensors: name -> `TensorInfo`.
        data_offset: file position that tensor offsets count from.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    data_offset: int


@dataclass(frozen=True, slots=True)
class SafetensorsIndex:
    """All tensors of a folder, sharded or not.

    Attributes:
        files: headers of the shards, in the order of their names.
        header_of: tensor name -> header of the shard that holds it.
    """

    files: tuple[SafetensorsHeader, ...]
    header_of: Mapping[str, SafetensorsHeader]

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors together."""
        return sum(info.num_elements for file in self.files for info in file.tensors.values())


def read_header(path: str | Path) -> SafetensorsHeader:
    """Read and check one safetensors file's header.

    Raises:
        ModelError: the file cannot be opened.
        FileFormatError: truncated, or damaged in any way that can be seen.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise FileFormatError(f"{path}: {size} bytes are too few for a safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise FileFormatError(
                    f"{path}: a header of {length:,} bytes is announced and the file has {size:,}: "
                    f"it is truncated or no safetensors file"
                )
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    entries = _parse_object(path, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileFormatError(f"{path}: __metadata__ is not a table of strings")
    tensors = {name: _tensor_info(path, name, entry) for name, entry in entries.items()}
    data_offset = 8 + length
    check_placement(path, tensors.values(), size - data_offset)
    covered = sum(info.nbytes for info in tensors.values())
    if covered != size - data_offset:
        raise FileFormatError(
            f"{path}: the tensors cover {covered:,} of {size - data_offset:,} bytes of data: "
            f"the file has gaps or a tail that nothing describes"
        )
    return SafetensorsHeader(
        path, MappingProxyType(metadata), MappingProxyType(tensors), data_offset
    )


def read_folder(folder: str | Path) -> SafetensorsIndex:
    """Headers of a folder's `model.safetensors`, or of the shards its index names.

    Raises:
        ModelError: neither file exists, or a shard is missing.
        FileFormatError: a shard is damaged, or lacks a tensor that the index places in it.
    """
    folder = Path(folder)
    index_path = folder / INDEX_NAME
    if not index_path.is_file():
        if not (folder / SINGLE_NAME).is_file():
            raise ModelError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}")
        header = read_header(folder / SINGLE_NAME)
        return SafetensorsIndex((header,), MappingProxyType(dict.fromkeys(header.tensors, header)))
    weight_map = _parse_object(index_path, index_path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileFormatError(f"{index_path}: weight_map is missing or empty")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise FileFormatError(f"{index_path}: tensor {name} lies in {shard!r}, no file name")
    files = {shard: read_header(folder / shard) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            raise FileFormatError(f"{index_path}: tensor {name} is not in {shard}")
    header_of = {name: files[shard] for name, shard in weight_map.items()}
    return SafetensorsIndex(tuple(files.values()), MappingProxyType(header_of))


def _parse_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: the header is not valid JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise FileFormatError(f"{path}: the header is a {type(parsed).__name__}, not an object")
    return parsed


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
    return table


def _tensor_info(path: Path, name: str, entry: Any) -> TensorInfo:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
    except (TypeError, KeyError, ValueError):
        raise FileFormatError(
            f"{path}: tensor {name} lacks a dtype, a shape or two data_offsets"
        ) from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FileFormatError(f"{path}: tensor {name} has the unknown dtype {dtype!r}")
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise FileFormatError(f"{path}: tensor {name} has an impossible shape or offset")
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits != (stop - start) * 8:
        raise FileFormatError(
            f"{path}: tensor {name} of shape {shape} in {dtype} takes {bits // 8:,} bytes, "
            f"and its offsets span {stop - start:,}"
        )
    return TensorInfo(name, dtype, tuple(shape), start, stop - start)
