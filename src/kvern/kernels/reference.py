"""The reference backend: `reference_ops` over numpy, and over torch where that is installed.

Always there, with or without a compiler. It shares the slab with every other backend, so a pool written by
one can be read by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import array_api_compat.numpy as array_numpy
import numpy as np

from kvern.kernels import reference_ops as ops
from kvern.kernels.dequant import dequantize
from kvern.kernels.protocol import (
    F32,
    I32,
    AttendBatch,
    AttendParams,
    HostTensor,
    PagedStream,
    Weight,
)
from kvern.kernels.reference_families import ReferenceFamilies
from kvern.kernels.reference_narrow import append_narrow, gather_own, gather_sealed
from kvern.store.dtypes import STORED_BYTES, decode, encode

RECIPE = "r1"
"""Raised whenever any result bit of the reference changes."""


@dataclass(slots=True)
class DecodedWeight:
    """A matrix decoded to float32, ``matrix [rows, cols]`` of the backend's namespace."""

    matrix: Any
    rows: int
    cols: int
    nbytes_owned: int


def stream_view(stream: PagedStream) -> np.ndarray[Any, Any]:
    """The stream's raw bytes, a view ``uint8 [num_blocks, num_heads, block_size, dim * size]``."""
    row_bytes = stream.dim * STORED_BYTES[stream.dtype]
    size = stream.num_heads * stream.block_size * row_bytes
    part = stream.pages[:, stream.offset : stream.offset + size]
    shape = (len(part), stream.num_heads, stream.block_size, row_bytes)
    strides = (part.strides[0], stream.block_size * row_bytes, row_bytes, 1)
    return np.lib.stride_tricks.as_strided(part, shape, strides)


def gather(stream: PagedStream, block_ids: I32, num_tokens: int) -> F32:
    """Decode the first ``num_tokens`` slots of a run of blocks: float32 ``[num_heads, num_tokens, dim]``.

    A narrow stream's blocks are sealed ones. Slots past ``num_tokens`` are cut off before anything calculates
    on them: they may hold NaN.
    """
    if stream.open is not None:
        return gather_sealed(stream, block_ids)[:, :num_tokens]
    data = stream_view(stream)[block_ids].transpose(1, 0, 2, 3)
    data = data.reshape(stream.num_heads, -1, data.shape[-1])[:, :num_tokens]
    return decode(data, stream.dtype)


def _with_own_blocks(
    streams: tuple[PagedStream, PagedStream],
    gathered: list[F32],
    key_positions: I32,
    batch: AttendBatch,
    seq: int,
) -> tuple[list[F32], I32, ops.Forms]:
    """Keys and values of whole blocks in their stored form, followed by those that the step knows as computed.

    Args:
        streams: keys and values, one of them narrow at least.
        gathered: both, from the pages.
        key_positions: the positions of what was gathered.
        batch: the step.
        seq: which sequence of it.
    """
    block_size = streams[0].block_size
    seq_len, num_rows = int(batch.seq_lens[seq]), int(np.diff(batch.cu_seqlens_q)[seq])
    first = (seq_len - num_rows) // block_size * block_size
    num_sealed = int(np.searchsorted(key_positions, seq_len // block_size * block_size))
    first_own = int(np.searchsorted(key_positions, first))
    both = [
        np.concatenate(
            (
                found[:, :num_sealed],
                found[:, first_own:] if stream.open is None else gather_own(stream, batch, seq),
            ),
            axis=1,
        )
        for stream, found in zip(streams, gathered, strict=True)
    ]
    own = np.arange(first, seq_len, dtype=np.int32)
    positions = np.concatenate((key_positions[:num_sealed], own))
    return both, positions, ops.Forms(num_sealed, block_size)


class ReferenceBackend(ReferenceFamilies):
    """Every operation by `reference_ops` on numpy arrays. Compared with others by a stated tolerance."""

    name = "reference"
    kernel_path = "numpy"
    row_invariant = False
    xp: Any = array_numpy

    def __init__(self, num_threads: int | None = None) -> None:
        """Args: num_threads: kept for reports; numpy's own thread pool is not ours to set."""
        self.num_threads = num_threads or 1

    def numerics_tag(self, weights_format: str) -> str:
        """See `Backend.numerics_tag`."""
        return f"{self.name}/{self.kernel_path}/{RECIPE}/{weights_format}"

    def _array(self, x: np.ndarray[Any, Any]) -> Any:
        """A numpy array as this backend's array, without a copy."""
        return x

    def _numpy(self, x: Any) -> np.ndarray[Any, Any]:
        """The other way round."""
        return cast("np.ndarray[Any, Any]", x)

    def prepare(self, tensors: Sequence[HostTensor], weights_format: str) -> Weight:
        """Decode to float32; ``weights_format`` makes no difference here: nothing is rounded."""
        parts = [dequantize(t.data, t.type, t.rows, t.cols) for t in tensors]
        matrix = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)
        return DecodedWeight(self._array(matrix), matrix.shape[0], matrix.shape[1], matrix.nbytes)

    def matmul(self, x: F32, weight: Weight, out: F32) -> None:
        """See `Backend.matmul`."""
        matrix = cast(DecodedWeight, weight).matrix
        out[...] = self._numpy(self.xp.matmul(self._array(x), self.xp.permute_dims(matrix, (1, 0))))

    def embed(self, weight: Weight, token_ids: I32, out: F32) -> None:
        """See `Backend.embed`."""
        matrix = cast(DecodedWeight, weight).matrix
        out[...] = self._numpy(
            self.xp.take(matrix, self._array(token_ids.astype(np.int64)), axis=0)
        )

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        """See `Backend.rms_norm`."""
        out[...] = self._numpy(ops.rms_norm(self.xp, self._array(x), self._array(weight), eps))

    def rotary(self, x: F32, positions: I32, cos: F32, sin: F32, interleaved: bool) -> None:
        """See `Backend.rotary`."""
        row_cos, row_sin = self._array(cos[positions]), self._array(sin[positions])
        x[...] = self._numpy(ops.rotate(self.xp, self._array(x), row_cos, row_sin, interleaved))

    def append(self, x: F32, stream: PagedStream, batch: AttendBatch) -> None:
        """See `Backend.append`."""
        if stream.open is not None:
            append_narrow(x, stream, batch)
            return
        blocks, slots = np.divmod(batch.slot_mapping, stream.block_size)
        stream_view(stream)[blocks, :, slots] = encode(x, stream.dtype)

    def attend(
        self,
        q: F32,
        keys: PagedStream,
        values: PagedStream,
        batch: AttendBatch,
        params: AttendParams,
        out: F32,
    ) -> int:
        """See `Backend.attend`; one sequence after the other."""
        products = 0
        for seq, seq_len in enumerate(batch.seq_lens.tolist()):
            rows = slice(int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1]))
            positions = batch.positions[rows]
            block_ids, key_positions = self._live_blocks(
                batch, seq, seq_len, positions, keys, params
            )
            num_keys = len(key_positions)
            gathered = [gather(stream, block_ids, num_keys) for stream in (keys, values)]
            forms = None
            if keys.open is not None or values.open is not None:
                gathered, key_positions, forms = _with_own_blocks(
                    (keys, values), gathered, key_positions, batch, seq
                )
            result, count = ops.attend_sequence(
                self.xp,
                self._array(q[rows]),
                self._array(gathered[0]),
                self._array(gathered[1]),
                self._array(positions),
                self._array(key_positions),
                params,
                forms,
            )
            out[rows] = self._numpy(result)
            products += count
        return products

    @staticmethod
    def _live_blocks(
        batch: AttendBatch,
        seq: int,
        seq_len: int,
        positions: I32,
        stream: PagedStream,
        params: AttendParams,
    ) -> tuple[I32, I32]:
        """Block ids that hold what the rows see, and the position of every slot in them before seq_len."""
        size = stream.block_size
        first = ops.first_visible(int(positions[0]), params) // size
        num_sink_blocks = min(first, -(-params.num_sink_tokens // size))
        wanted = np.r_[0:num_sink_blocks, first : -(-seq_len // size)]
        key_positions = (wanted[:, None] * size + np.arange(size)).reshape(-1)
        key_positions = key_positions[: key_positions.size - (wanted[-1] + 1) * size + seq_len]
        return batch.block_tables[seq][wanted], key_positions.astype(np.int32)

    def gated_activation(self, gate_up: F32, kind: str, out: F32) -> None:
        """See `Backend.gated_activation`."""
        half = gate_up.shape[-1] // 2
        gate, up = self._array(gate_up[:, :half]), self._array(gate_up[:, half:])
        with np.errstate(over="ignore"):  # exp of a large number: silu is then exactly 0
            out[...] = self._numpy(ops.activation(self.xp, gate, kind) * up)

    def add(self, x: F32, y: F32) -> None:
        """See `Backend.add`."""
        x += y
