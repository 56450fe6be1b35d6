"""The native backend: this package's own C++ kernels on the CPU.

Importable without the extension: `native_available` says whether it is there, and
`native_unavailable_reason` why not and how to build it.
"""

from __future__ import annotations

import importlib
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kvern.errors import UnsupportedModelError, UsageError
from kvern.kernels.native_families import NativeFamilies, batch_arrays
from kvern.kernels.protocol import (
    F32,
    I32,
    AttendBatch,
    AttendParams,
    HostTensor,
    PagedStream,
    Weight,
)
from kvern.spec.codec import INT8

RECIPE = "r3"
"""Raised whenever any result bit of any native kernel changes."""

ELEMENT_TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
"""What `NativeBackend.prepare` reads, in the extension's order."""

STREAM_TYPES = ("fp32", "fp16", "bf16", "int8")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
WEIGHTS_FORMATS = ("auto", "fp32", "bf16")  # in the extension's order
KERNEL_PATHS = ("amx", "avx512", "avx512vnni", "avx2", "portable")

_TYPE_INDEX = {name: index for index, name in enumerate(ELEMENT_TYPES)}
_STREAM_INDEX = {name: index for index, name in enumerate(STREAM_TYPES)}
_ACTIVATION_INDEX = {name: index for index, name in enumerate(ACTIVATIONS)}


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module("kvern.kernels._native"), None
    except ImportError as error:
        return None, (
            f"the native kernels are not built ({error}): reinstall kvern on a machine with a C++17 "
            "compiler and CMake, with KVERN_REQUIRE_NATIVE=1 to see why a build fails"
        )


_native, _reason = _load()


def native_available() -> bool:
    """True when the extension module is there and loads."""
    return _native is not None


def native_unavailable_reason() -> str | None:
    """One sentence saying why there is no native backend and what to do; None when there is one."""
    return _reason


def available_kernel_paths() -> tuple[str, ...]:
    """Kernel paths that this machine can run, best first; empty without the extension."""
    return tuple(_native.available_paths()) if _native is not None else ()


def default_num_threads() -> int:
    """The number of CPU cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


class NativeBackend(NativeFamilies):
    """The operations on the CPU, bit-identical whatever the batch, the chunking or the threads.

    One pool of threads belongs to the backend; idle threads sleep. After a fork the child starts
    threads of its own at its first operation. Operations release the GIL and run one at a time.
    """

    name = "native"
    row_invariant = True

    def __init__(self, num_threads: int | None = None, kernel_path: str | None = None) -> None:
        """Start on a kernel path.

        Args:
            num_threads: threads that calculate, the caller's included; the cores of this process
                when None.
            kernel_path: one of `KERNEL_PATHS`; when None, ``$KVERN_KERNEL_PATH`` or else the best
                this machine can run.

        Raises:
            UsageError: no extension, an impossible number of threads, or a path that cannot run here.
        """
        if _native is None:
            raise UsageError(_reason or "the native kernels are not built")
        threads = default_num_threads() if num_threads is None else num_threads
        if not 1 <= threads <= 1024:
            raise UsageError(f"the number of threads is {threads}: choose 1 to 1024")
        wanted = kernel_path or os.environ.get("KVERN_KERNEL_PATH", "")
        try:
            self._native, self._runtime = _native, _native.Runtime(threads, wanted)
        except ValueError as error:
            raise UsageError(str(error)) from None
        self.kernel_path: str = self._runtime.path
        self.num_threads: int = threads

    def numerics_tag(self, weights_format: str) -> str:
        """See `Backend.numerics_tag`."""
        return f"{self.name}/{self.kernel_path}/{RECIPE}/{weights_format}"

    def prepare(self, tensors: Sequence[HostTensor], weights_format: str) -> Weight:
        """See `Backend.prepare`. The packed form is owned; the file's pages are let go.

        Raises:
            UnsupportedModelError: an element type that no kernel reads.
            ValueError: sizes that do not fit together.
        """
        if weights_format not in WEIGHTS_FORMATS:
            raise UsageError(
                f"weights_format {weights_format!r} is not one of {', '.join(WEIGHTS_FORMATS)}"
            )
        parts = []
        for tensor in tensors:
            if tensor.type not in _TYPE_INDEX:
                raise UnsupportedModelError(
                    f"tensor {tensor.name} has element type {tensor.type}, "
                    f"known are {', '.join(ELEMENT_TYPES)}"
                )
            if tensor.cols != tensors[0].cols:
                raise ValueError(
                    f"{tensor.name} has {tensor.cols} columns, {tensors[0].name} has {tensors[0].cols}"
                )
            parts.append((_TYPE_INDEX[tensor.type], tensor.rows, _aligned_bytes(tensor.data)))
        weight: Weight = self._runtime.prepare(
            parts, tensors[0].cols, WEIGHTS_FORMATS.index(weights_format)
        )
        for tensor in tensors:
            _release_mapping(tensor.data)
        return weight

    def matmul(self, x: F32, weight: Weight, out: F32) -> None:
        """See `Backend.matmul`."""
        self._runtime.matmul(x, weight, out)

    def embed(self, weight: Weight, token_ids: I32, out: F32) -> None:
        """See `Backend.embed`."""
        self._runtime.embed(weight, token_ids, out)

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        """See `Backend.rms_norm`."""
        self._runtime.rms_norm(x, weight, eps, out)

    def rotary(self, x: F32, positions: I32, cos: F32, sin: F32, interleaved: bool) -> None:
        """See `Backend.rotary`."""
        self._runtime.rotary(x, positions, cos, sin, interleaved)

    def append(self, x: F32, stream: PagedStream, batch: AttendBatch) -> None:
        """See `Backend.append`."""
        self._runtime.append(x, _stream(stream), batch_arrays(batch))

    def attend(
        self,
        q: F32,
        keys: PagedStream,
        values: PagedStream,
        batch: AttendBatch,
        params: AttendParams,
        out: F32,
    ) -> int:
        """See `Backend.attend`."""
        limits = (
            params.scale,
            params.window or 0,
            params.chunk or 0,
            params.num_sink_tokens,
            params.softcap or 0.0,
        )
        pairs: int = self._runtime.attend(
            q,
            _stream(keys),
            _stream(values),
            batch_arrays(batch),
            limits,
            params.sink_logits,
            out,
        )
        return pairs

    def gated_activation(self, gate_up: F32, kind: str, out: F32) -> None:
        """See `Backend.gated_activation`."""
        self._runtime.gated_activation(gate_up, _ACTIVATION_INDEX[kind], out)

    def add(self, x: F32, y: F32) -> None:
        """See `Backend.add`."""
        self._runtime.add(x, y)

    @contextmanager
    def recording(
        self, token_ids: I32, batches: Sequence[AttendBatch], max_tokens: int
    ) -> Iterator[Recording]:
        """Record the operations of one step, which run as usual, so that other steps can repeat them.

        A later step may have any number of tokens: the program keeps base addresses and row widths, so
        every buffer must be the start of one with room for ``max_tokens`` rows. Operations must read
        token ids, positions, slots and tables from ``token_ids`` and ``batches``, whose arrays a later
        step brings anew. What is calculated on the buffers outside the backend is not repeated.

        Args:
            token_ids: int32 ``[T]``, T at least 2: one row does not show how far rows lie apart.
            batches: one per KV group.
            max_tokens: rows that every buffer has room for.

        Yields:
            A `Recording`, whose `program` is set when the block ends; None when some operation
            cannot be repeated (it computed another number of rows, or read other arrays) or T is 1.
        """
        recording = Recording()
        self._runtime.start_recording(token_ids, [batch_arrays(batch) for batch in batches])
        try:
            yield recording
        except BaseException:
            self._runtime.finish_recording(max_tokens)
            raise
        recorded = self._runtime.finish_recording(max_tokens)
        if recorded is not None:
            recording.program = NativeProgram(self._runtime, recorded)


class NativeProgram:
    """A recorded step: all its operations again, for other tokens, in one call and one region of the pool.

    Neighbouring operations are joined where that changes no bit: a norm or a gated activation with
    the product that reads it, a product with the sum that follows, row operations with each other.
    """

    def __init__(self, runtime: Any, recorded: Any) -> None:
        """Made by `NativeBackend.recording`."""
        self._runtime = runtime
        self._recorded = recorded
        self.max_tokens: int = recorded.max_tokens
        self.max_positions: int = recorded.max_positions
        """Positions that the recorded rotary tables cover; record anew for later ones."""
        self.num_ops: int = recorded.num_ops
        """Operations left after joining."""

    def run(self, token_ids: I32, batches: Sequence[AttendBatch]) -> int:
        """Repeat the step for other tokens.

        Args:
            token_ids: int32 ``[T]``, T up to ``max_tokens``.
            batches: one per KV group, in the recorded order.

        Returns:
            Query-key products per head, summed over all attend operations.

        Raises:
            ValueError: a number is out of range; nothing ran. Or a block table names no valid block
                for a visible key; then the results are worthless.
        """
        pairs: int = self._runtime.run_program(
            self._recorded, token_ids, [batch_arrays(batch) for batch in batches]
        )
        if pairs < 0:
            raise ValueError("a block table names no valid block for a visible key")
        return pairs


@dataclass(slots=True)
class Recording:
    """What `NativeBackend.recording` yields."""

    program: NativeProgram | None = None


def _stream(stream: PagedStream) -> tuple[Any, ...]:
    codec, opened = stream.codec, stream.open
    if codec not in (None, INT8):
        raise UsageError(
            f"the native kernels do not read {stream.dtype} keys and values of this kind: choose "
            f"{', '.join(STREAM_TYPES)}, or the reference backend"
        )
    return (
        stream.pages,
        stream.offset,
        _STREAM_INDEX[stream.dtype],
        stream.num_heads,
        stream.block_size,
        stream.dim,
        0 if codec is None else stream.scale_offset,
        None if opened is None else (opened.pages, opened.offset, opened.rows),
    )


def _aligned_bytes(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _release_mapping(data: np.ndarray[Any, Any]) -> None:
    """Let go of a read-only map's resident pages: the packed copy is all that is read from now on.

    Only pages that lie wholly inside ``data`` go, and a later read brings them back from the file.
    """
    owner: Any = data
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or data.flags.writeable or not hasattr(owner, "madvise"):
        return
    start = data.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        owner.madvise(mmap.MADV_DONTNEED, first, length)
