"""Weights as they lie in their files: memory-mapped, read when used, each shape checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvern.errors import ModelError, UnsupportedModelError
from kvern.kernels.dequant import ELEMENT_TYPES, dequantize
from kvern.kernels.protocol import HostTensor
from kvern.spec import gguf, safetensors
from kvern.spec.gguf import GGUFHeader
from kvern.spec.safetensors import SafetensorsHeader

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: ``data[offset : offset + nbytes]`` of a mapped file.

    `shape` is rows first, as in ``[out_features, in_features]``.
    """

    type: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class WeightSource:
    """The tensors of one model, from a GGUF file or from safetensors files."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor], is_gguf: bool) -> None:
        """Args: path: for messages; tensors: by name; is_gguf: which naming the file uses."""
        self.path = path
        self.is_gguf = is_gguf
        self.tensors = tensors
        self._maps: dict[Path, U8] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def _bytes(self, tensor: StoredTensor) -> U8:
        if tensor.file not in self._maps:
            self._maps[tensor.file] = np.memmap(tensor.file, np.uint8, "r").view(np.ndarray)
        return self._maps[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]

    def raw(self, name: str) -> U8:
        """A tensor's bytes as stored, ``uint8 [nbytes]``, not copied."""
        return self._bytes(self.tensors[name])

    def matrix(self, name: str, rows: int, cols: int) -> HostTensor:
        """A matrix ``[rows, cols]`` by name, not copied.

        Raises:
            ModelError: it is missing or has another shape.
            UnsupportedModelError: its element type is not one that kvern reads.
        """
        tensor = self._find(name, (rows, cols))
        return HostTensor(name, tensor.type, rows, cols, self._bytes(tensor))

    def vector(self, name: str, size: int) -> F32:
        """A vector by name, decoded to float32. Raises as `matrix`."""
        tensor = self._find(name, (size,))
        vector: F32 = dequantize(self._bytes(tensor), tensor.type, 1, size)[0]
        return vector

    def array(self, name: str, *shape: int) -> F32:
        """A tensor of any shape, decoded to float32. Raises as `matrix`."""
        tensor = self._find(name, shape)
        rows = 1
        for size in shape[:-1]:
            rows *= size
        return dequantize(self._bytes(tensor), tensor.type, rows, shape[-1]).reshape(shape)

    def matrices(self, name: str, count: int, rows: int, cols: int) -> list[HostTensor]:
        """The matrices of one tensor ``[count, rows, cols]``, not copied. Raises as `matrix`."""
        tensor = self._find(name, (count, rows, cols))
        parts = self._bytes(tensor).reshape(count, -1)
        return [
            HostTensor(f"{name}[{index}]", tensor.type, rows, cols, part)
            for index, part in enumerate(parts)
        ]

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path} has no tensor {name}, which the model needs")
        if tuple(tensor.shape) != shape:
            have, need = (" x ".join(map(str, s)) for s in (tensor.shape, shape))
            raise ModelError(
                f"tensor {name} of {self.path} is {have}; the configuration needs {need}"
            )
        if tensor.type not in ELEMENT_TYPES:
            raise UnsupportedModelError(
                f"tensor {name} of {self.path} is stored as {tensor.type}; "
                f"kvern reads {', '.join(ELEMENT_TYPES)}"
            )
        return tensor


def decoded(tensor: HostTensor) -> F32:
    """A matrix as float32 ``[rows, cols]``."""
    return dequantize(tensor.data, tensor.type, tensor.rows, tensor.cols)


def take_rows(tensor: HostTensor, order: npt.NDArray[np.int64]) -> HostTensor:
    """The rows of a matrix in another order, as stored; a copy."""
    rows = tensor.data.reshape(tensor.rows, -1)[order]
    return HostTensor(tensor.name, tensor.type, len(order), tensor.cols, rows.reshape(-1))


def transposed(tensor: HostTensor) -> HostTensor:
    """The transposed matrix; decoded to float32 where elements share quantisation blocks."""
    size = {"F32": 4, "F16": 2, "BF16": 2}.get(tensor.type)
    if size is None:
        data = np.ascontiguousarray(decoded(tensor).T).reshape(-1).view(np.uint8)
        return HostTensor(tensor.name, "F32", tensor.cols, tensor.rows, data)
    elements = np.ascontiguousarray(tensor.data).reshape(tensor.rows, tensor.cols, size)
    data = np.ascontiguousarray(elements.transpose(1, 0, 2)).reshape(-1)
    return HostTensor(tensor.name, tensor.type, tensor.cols, tensor.rows, data)


def open_weights(path: Path, header: GGUFHeader | None = None) -> WeightSource:
    """The weights of a GGUF file or a Hugging Face folder; reads headers only.

    Args:
        path: the file or folder.
        header: an already parsed GGUF header, to read it once.

    Raises:
        FileFormatError: a damaged file. ModelError: a folder without weights.
    """
    if path.is_dir():
        files = safetensors.read_folder(path).files
        tensors = {k: v for file in files for k, v in _stored(file.path, file).items()}
        return WeightSource(path, tensors, is_gguf=False)
    return WeightSource(path, _stored(path, header or gguf.read_header(path)), is_gguf=True)


def _stored(path: Path, header: GGUFHeader | SafetensorsHeader) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(
            info.type, info.shape, path, header.data_offset + info.offset, info.nbytes
        )
        for name, info in header.tensors.items()
    }
