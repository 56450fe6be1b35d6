"""How far one row of logits lies from another, and when that is too far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

TOLERANCES = {"fp32": 1e-4, "fp16": 5e-4, "bf16": 3e-3, "int8": 3e-2}
"""Share of a row's logit range by which it may differ on a backend that is not row-invariant, by the
stored dtype of keys and values: a last-bit difference of a float32 sum can round to the next stored number,
which for int8 lies 1/127 of the vector's largest element away.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Between an observed row and the row without a cache.

    Attributes:
        largest: largest absolute difference of a logit; infinite when either row is not finite.
        relative: the same as a share of the uncached row's range.
        kl: Kullback-Leibler divergence of the observed distribution from the uncached one, in nats.
    """

    largest: float
    relative: float
    kl: float

    def is_within(self, tolerance: float) -> bool:
        """Tolerance 0 demands equal bits' worth: no difference at all."""
        return self.relative <= tolerance


NO_DIFFERENCE = Difference(0.0, 0.0, 0.0)
INFINITE = Difference(np.inf, np.inf, np.inf)


def tolerance_of(row_invariant: bool, stored_dtypes: Iterable[str]) -> float:
    """What a backend must keep to: 0 where results are bit-identical by design."""
    if row_invariant:
        return 0.0
    tolerances = [TOLERANCES.get(dtype, TOLERANCES["bf16"]) for dtype in stored_dtypes]
    return max(tolerances, default=TOLERANCES["fp32"])


def compare(observed: F32, uncached: F32) -> Difference:
    """Compare two rows ``[vocab_size]``."""
    if np.array_equal(observed, uncached):  # false for rows that hold a NaN
        return NO_DIFFERENCE if np.isfinite(uncached).all() else INFINITE
    if not (np.isfinite(observed).all() and np.isfinite(uncached).all()):
        return INFINITE
    largest = float(np.max(np.abs(observed.astype(np.float64) - uncached)))
    return Difference(largest, largest / spread(uncached), divergence(uncached, observed))


def spread(row: F32) -> float:
    """A row's range, largest minus smallest logit; 1 for a constant row."""
    return float(row.max() - row.min()) or 1.0


def divergence(p_logits: F32, q_logits: F32) -> float:
    """Kullback-Leibler divergence of softmax(q) from softmax(p), in nats, at least 0."""
    p, q = _log_softmax(p_logits), _log_softmax(q_logits)
    return max(0.0, float(np.sum(np.exp(p) * (p - q))))


def _log_softmax(row: F32) -> npt.NDArray[np.float64]:
    shifted = row.astype(np.float64) - float(row.max())
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
