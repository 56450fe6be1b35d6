"""What a file's header says of a tensor, and the checks that every format shares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from kvern.errors import FileFormatError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a weights file.

    Attributes:
        name: the tensor's name in the file.
        type: element type in the file's spelling: "Q4_1" (GGUF), "BF16" (both), "F8_E4M3".
        shape: dimensions, slowest first, as numpy has them: (rows, columns).
        offset: first byte, counted from the header's `data_offset`.
        nbytes: stored bytes, quantisation blocks included.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def num_elements(self) -> int:
        """Elements, whatever their stored size; a scalar has one."""
        return prod(self.shape)


def check_placement(path: Path, tensors: Iterable[TensorInfo], data_bytes: int) -> None:
    """Every tensor lies inside the data and none overlaps another.

    Raises:
        FileFormatError: names the tensor and the numbers.
    """
    end, previous = 0, ""
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset + info.nbytes > data_bytes:
            raise FileFormatError(
                f"{path}: tensor {info.name} needs {info.nbytes:,} bytes at data offset "
                f"{info.offset:,}, but the file holds {data_bytes:,} bytes of data: "
                f"it is truncated or damaged, fetch it again"
            )
        if info.offset < end and info.nbytes:
            raise FileFormatError(
                f"{path}: tensors {previous} and {info.name} overlap at data offset {info.offset:,}"
            )
        end, previous = max(end, info.offset + info.nbytes), info.name
