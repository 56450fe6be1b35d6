"""What the machine can do: memory reads and arithmetic, measured beside the engine.

With the native kernels their own threads and instructions are used. Without them numpy stands in:
its figures are lower bounds of the machine's limits, and say so.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

READ_BYTES = 512 * 2**20
"""Larger than the last-level caches of the machines that this is for."""

READ_TRIES = 8

ARITHMETIC_KINDS = ("int8", "bf16", "fp32")
"""In the order of the native module's enumeration."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The best of several tries, per second; of memory reads the second best, the first may be a fluke.

    Attributes:
        source: ``native (avx512)`` or ``numpy``.
        threads: that were used.
        read_bytes_per_s: reading memory once, front to back.
        int8_ops_per_s: integer multiplications and additions, each counted.
        bf16_ops_per_s: the same in bfloat16 with float32 sums.
        fp32_ops_per_s: the same in float32.
    """

    source: str
    threads: int
    read_bytes_per_s: float
    int8_ops_per_s: float
    bf16_ops_per_s: float
    fp32_ops_per_s: float

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def arithmetic(self, kind: str) -> float:
        """Operations per second of ``int8``, ``bf16`` or ``fp32``."""
        return float(getattr(self, f"{kind}_ops_per_s"))


def best_of(first: Limits, second: Limits) -> Limits:
    """The greater of each: a limit is what was reached at any time."""
    rates = {
        name: max(getattr(first, name), getattr(second, name))
        for name in first.document()
        if name.endswith("_per_s")
    }
    return Limits(first.source, first.threads, **rates)


def measure_limits(
    threads: int, kernel_path: str | None, seconds: float = 0.2, read_bytes: int = READ_BYTES
) -> Limits:
    """Measure; takes about ten times ``seconds``.

    Args:
        threads: to use.
        kernel_path: of the native backend; None when another backend runs.
        seconds: length of one arithmetic try.
        read_bytes: size of the memory that is read.
    """
    if kernel_path is not None:
        return _native_limits(threads, kernel_path, seconds, read_bytes)
    return _numpy_limits(seconds, read_bytes)


def _native_limits(threads: int, kernel_path: str, seconds: float, read_bytes: int) -> Limits:
    runtime: Any = importlib.import_module("kvern.kernels._native").Runtime(threads, kernel_path)
    data = np.ones(read_bytes, np.uint8)
    rates = {
        f"{kind}_ops_per_s": _best_rate(partial(runtime.time_arithmetic, number), seconds)
        for number, kind in enumerate(ARITHMETIC_KINDS)
    }
    reads = sorted(read_bytes / runtime.time_reads(data) for _ in range(READ_TRIES))[-2]
    return Limits(f"native ({kernel_path})", threads, reads, **rates)


def _best_rate(measure: Callable[[int], tuple[float, float]], seconds: float) -> float:
    """Best of three tries, each long enough that starting the threads does not count."""
    rounds = 20_000
    took, _ = measure(rounds)
    rounds = max(rounds, int(rounds * seconds / max(took, 1e-6)))
    tries = [measure(rounds) for _ in range(3)]
    return max(operations / took for took, operations in tries)


def _numpy_limits(seconds: float, read_bytes: int) -> Limits:
    data = np.ones(read_bytes // 8, np.int64)
    size = 512
    matrix = np.ones((size, size), np.float32)
    out = np.empty_like(matrix)

    def multiply(rounds: int) -> tuple[float, float]:
        times = max(1, rounds // 20_000)
        started = time.perf_counter()
        for _ in range(times):
            np.matmul(matrix, matrix, out=out)
        return time.perf_counter() - started, 2.0 * size**3 * times

    rate = _best_rate(multiply, seconds)
    reads = sorted(data.nbytes / _seconds(data.max) for _ in range(READ_TRIES))[-2]
    return Limits("numpy", 1, reads, rate, rate, rate)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
