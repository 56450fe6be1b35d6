"""Operations on rows, composed of a backend's own and of elementwise numpy.

A row's result depends on that row alone, bit for bit: reductions run along the contiguous last axis
of one row, in numpy's fixed order, and no matrix product is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import Backend

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm with its weights: RMS, or layer norm, which is an RMS norm of ``x - mean(x)``."""

    weight: F32
    bias: F32 | None
    eps: float
    is_centered: bool

    def apply(self, backend: Backend, x: F32, out: F32) -> None:
        """``out [T, n]`` for ``x [T, n]``; they must not overlap."""
        if self.is_centered:
            x = x - np.mean(x, axis=-1, keepdims=True)
        backend.rms_norm(x, self.weight, self.eps, out)
        if self.bias is not None:
            out += self.bias


def softmax(x: F32) -> F32:
    """Softmax along the last axis of a C-contiguous ``[T, n]``."""
    exponentials = np.exp(x - np.max(x, axis=-1, keepdims=True))
    result: F32 = exponentials / np.sum(exponentials, axis=-1, keepdims=True)
    return result


def sigmoid(x: F32) -> F32:
    """``1 / (1 + exp(-x))``; exactly 0 where exp overflows."""
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + np.exp(-x))


def silu(x: F32) -> F32:
    """``x * sigmoid(x)``."""
    return x * sigmoid(x)


def softplus(x: F32) -> F32:
    """``log(1 + exp(x))``, and x itself where that is the same number."""
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, np.float32(20)))))


def cut_to_sparsity(x: F32, share: float) -> None:
    """Each row less the value that this share of a normal distribution like it lies below, and not below 0.

    In place, for a view ``[T, n]``.
    """
    rows = np.ascontiguousarray(x)
    deviations = rows - np.mean(rows, axis=-1, keepdims=True)
    spread = np.sqrt(np.mean(deviations * deviations, axis=-1, keepdims=True))
    np.maximum(deviations - spread * np.float32(NormalDist().inv_cdf(share)), np.float32(0), out=x)


def largest(scores: F32, count: int) -> I64:
    """Indices of the ``count`` largest per row, largest first; a tie goes to the lower index."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    return np.ascontiguousarray(order[:, :count])


def plain_activation(backend: Backend, x: F32, kind: str, gate_up: F32, out: F32) -> None:
    """``out[T, n] = act(x)``, by the backend's gated activation with ones as the other half.

    Args:
        backend: computes it.
        x: ``[T, n]``.
        kind: ``relu``, ``relu2`` (its square) or a kind of `Backend.gated_activation`.
        gate_up: scratch ``[T, 2n]``.
        out: ``[T, n]``; may be ``x``.
    """
    if kind in ("relu", "relu2"):
        np.maximum(x, np.float32(0), out=out)
        if kind == "relu2":
            out *= out
        return
    width = x.shape[-1]
    gate_up[:, :width] = x
    gate_up[:, width:] = 1
    backend.gated_activation(gate_up, kind, out)
