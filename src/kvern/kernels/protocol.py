"""The operation set: what a decoder may ask of a backend, and the data the operations share.

Every backend (native, reference, torch) implements `Backend`. Activations are float32, C-contiguous,
one row per token: ``[num_tokens, features]``. All results go into arrays that the caller provides,
so that a step allocates nothing and its list of calls can be replayed.

    tokens of one step:   |-- seq 0: 5 --|-- seq 1: 1 --|-- seq 2: 3 --|     rows of x, q, k, v
    cu_seqlens_q:         0              5              6              9
    seq_lens:             5              812            35                   keys visible after append
    block_tables:         [[7, 0...], [3, 9, ...], [2, 5, 8, 0...]]           absolute block index -> id

Narrow streams (`PagedStream.open`) follow one rule: the query at position p sees the keys of its own block,
``[b0, p]`` with ``b0 = p // block_size * block_size``, as computed (rounded to bf16), and all earlier keys in
their stored form, whether they were computed in this step or a year ago.

    block 0        block 1        block 2, in seat s
    [ sealed     ] [ sealed     ] [ o o o o o . . . ]      query 20 sees 0..15 sealed, 16..20 as computed;
                    query 12 sees 0..7 sealed and 8..12 as computed, from the rows of the step that has it

A token's result depends on its own row, its own sequence's cache and the weights, and on nothing
else: not on the rows beside it, the chunking, the number of threads. On the native backend that holds
bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvern.kernels.family_protocol import FamilyOperations
from kvern.store.streams import PagedStream as PagedStream

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A weight as it lies in its file.

    Attributes:
        name: the tensor's name in the file, for messages.
        type: element type in ggml's spelling: ``F32``, ``F16``, ``BF16``, ``Q8_0``, ``Q4_0``, ``Q4_1``,
            ``Q5_0``, ``Q5_1``, ``Q4_K``, ``Q5_K``, ``Q6_K``.
        rows: number of output features (1 for a vector).
        cols: number of input features; rows are stored one after the other, each a whole number of
            quantisation blocks.
        data: the raw bytes, ``uint8 [nbytes]``, usually a view of a memory map.
    """

    name: str
    type: str
    rows: int
    cols: int
    data: U8


@dataclass(slots=True)
class AttendBatch:
    """Which rows belong to which sequence, and where each sequence's keys lie. Built once per step.

    Attributes:
        cu_seqlens_q: int32 ``[num_seqs + 1]``, first row of each sequence.
        seq_lens: int32 ``[num_seqs]``, number of keys after this step's append; the query in row r of a
            sequence with q_len rows has position ``seq_len - q_len + (r - first row)`` (bottom-right).
        block_tables: int32 ``[num_seqs, max_blocks]``; entry i holds positions i*block_size and up;
            0 is the null block and is never read.
        positions: int32 ``[num_tokens]``, absolute position of every row.
        slot_mapping: int64 ``[num_tokens]``, ``block_id * block_size + slot`` where append writes the row.
        backend_data: what a backend prepared for this batch (its work list); owned by the backend.
        regimes: int32 ``[num_tokens]``, which position regime each row's sequence is in
            (`kvern.spec.regimes`); None: all in the first. The decoder's business alone.
        seats: int32 ``[num_seqs]``, each sequence's place in the open pages of narrow streams; None where the
            group has none. A sequence whose first row lies inside a block has no rows in a later block
            that is not complete with this step.
    """

    cu_seqlens_q: I32
    seq_lens: I32
    block_tables: I32
    positions: I32
    slot_mapping: I64
    backend_data: dict[str, Any] = field(default_factory=dict)
    regimes: I32 | None = None
    seats: I32 | None = None


@dataclass(frozen=True, slots=True)
class AttendParams:
    """What a layer's attention does beside softmax(q k / sqrt(d)) v.

    Attributes:
        scale: factor on q·k.
        window: query p sees keys p-window+1..p; None for all.
        chunk: query p sees keys from ``p // chunk * chunk``; None for all.
        num_sink_tokens: first positions that stay visible outside the window.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None for none.
        sink_logits: float32 ``[num_heads]``, a learned logit per head that takes part in the softmax
            without a value (gpt-oss); None for none.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    num_sink_tokens: int = 0
    softcap: float | None = None
    sink_logits: F32 | None = None


class Weight(Protocol):
    """A matrix that a backend has prepared; opaque apart from its shape and what it costs."""

    rows: int
    cols: int
    nbytes_owned: int
    """Bytes that preparing it allocated (0 when the file's own bytes are read)."""


@runtime_checkable
class Backend(FamilyOperations, Protocol):
    """The operations. `T` is num_tokens; shapes are checked, a wrong one raises ValueError."""

    name: str
    """``native``, ``reference`` or ``torch``."""

    kernel_path: str
    """Which code runs: ``amx``, ``avx512``, ``avx512vnni``, ``avx2``, ``portable``, ``numpy``, ``torch-cpu``"""

    row_invariant: bool
    """True when a row's bits never depend on the other rows (the native backend)."""

    num_threads: int

    def numerics_tag(self, weights_format: str) -> str:
        """Name of the numeric recipe: equal tags give equal bits on one machine.

        It is part of every block hash and names backend, kernel path, recipe version, weights format.
        """
        ...

    def prepare(self, tensors: Sequence[HostTensor], weights_format: str) -> Weight:
        """Take one matrix, or several stacked by rows (q, k and v), for `matmul` and `embed`.

        Args:
            tensors: equal ``cols``; element types may differ.
            weights_format: ``auto`` (the stored form), ``fp32`` (decoded, float32 arithmetic), or ``bf16``
                (decoded and rounded to bf16, as the activations are, with float32 sums).
        """
        ...

    def matmul(self, x: F32, weight: Weight, out: F32) -> None:
        """``out[T, rows] = x[T, cols] @ weight.T``; one call per weight and step."""
        ...

    def embed(self, weight: Weight, token_ids: I32, out: F32) -> None:
        """``out[T, cols] =`` the rows of ``weight`` named by ``token_ids [T]``."""
        ...

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        """``out = x / sqrt(mean(x^2) + eps) * weight`` per row of ``x [T, n]``.

        n is ``len(weight)``; T may count heads: norms of q and k view ``[T * heads, head_dim]``.
        """
        ...

    def rotary(self, x: F32, positions: I32, cos: F32, sin: F32, interleaved: bool) -> None:
        """Rotate ``x [T, heads, dim]`` in place.

        Args:
            x: a view whose last axis is contiguous; the token stride may exceed heads * dim.
            positions: absolute position of each row, int32 ``[T]``.
            cos: float32 ``[max_positions, rotary_dim / 2]``; dims past rotary_dim stay as they are.
            sin: the same shape.
            interleaved: pairs are (0, 1), (2, 3), ... (GGUF llama) instead of (i, i + rotary_dim / 2).
        """
        ...

    def append(self, x: F32, stream: PagedStream, batch: AttendBatch) -> None:
        """Store rows ``x [T, heads, dim]`` (token stride free) at their slots, rounded to the dtype.

        A narrow stream's rows are rounded to bf16 into ``stream.open.rows``. Then every block that is
        complete with this step is sealed into its page (`kvern.store.codecs` is the definition), from the
        open page what came earlier, and the rows of a block that stays incomplete go into the open page of
        their sequence's seat. Nothing that this reads is written over, so that a step can be repeated.
        """
        ...

    def attend(
        self,
        q: F32,
        keys: PagedStream,
        values: PagedStream,
        batch: AttendBatch,
        params: AttendParams,
        out: F32,
    ) -> int:
        """Causal attention of ``q [T, heads, key_dim]`` over paged keys and values.

        Query head h reads KV head ``h // (heads / num_kv_heads)``. Each row sees the positions of its own
        sequence up to and including its own, within ``params``. Slots past a sequence's length may hold
        anything, NaN included. ``out [T, heads, value_dim]``.

        Returns:
            The number of query-key products per head that were needed: the sum over rows of the keys
            that the row sees, counted where the work is done, so that reports never quote a formula.
        """
        ...

    def gated_activation(self, gate_up: F32, kind: str, out: F32) -> None:
        """``out[T, n] = act(gate_up[:, :n]) * gate_up[:, n:]``, kind ``silu``, ``gelu`` or ``gelu_tanh``."""
        ...

    def add(self, x: F32, y: F32) -> None:
        """``x += y``, both ``[T, n]``: the residual stream."""
        ...
