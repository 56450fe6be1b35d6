"""Norms with their weights, and what Gemma 3n cuts off its gates.

A row's result depends on that row alone, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import Backend

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm with its weights: RMS, or layer norm, which is an RMS norm of ``x - mean(x)``."""

    weight: F32
    bias: F32 | None
    eps: float
    is_centered: bool

    def apply(self, backend: Backend, x: F32, out: F32) -> None:
        """``out [T, n]`` for ``x [T, n]``; they must not overlap."""
        if self.is_centered or self.bias is not None:
            backend.norm(x, self.weight, self.bias, self.eps, self.is_centered, out)
        else:
            backend.rms_norm(x, self.weight, self.eps, out)


def cut_to_sparsity(x: F32, share: float) -> None:
    """Each row less the value that this share of a normal distribution like it lies below, and not below 0.

    In place, for a view ``[T, n]``.
    """
    rows = np.ascontiguousarray(x)
    deviations = rows - np.mean(rows, axis=-1, keepdims=True)
    spread = np.sqrt(np.mean(deviations * deviations, axis=-1, keepdims=True))
    np.maximum(deviations - spread * np.float32(NormalDist().inv_cdf(share)), np.float32(0), out=x)
