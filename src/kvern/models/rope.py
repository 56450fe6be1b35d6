"""Rotary frequencies and their cos/sin tables; those of length-dependent kinds regime by regime.

Frequencies and angles are float32, as in the models' own training code; a table row depends on its
position alone, so growing a table never changes an existing row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.errors import ModelError, UnsupportedModelError
from kvern.kernels.protocol import AttendBatch
from kvern.models.config import RopeConfig
from kvern.spec.regimes import PositionRegimes

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

SCALING_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
OLD_KINDS = {"su": "longrope", "mrope": "default"}
"""Names of older files. mrope turns text by its position alone."""
MINIMUM_ROWS = 4096
MAX_REMEMBERED = 64
"""Regimes whose frequencies are kept: a few numbers each, and sequences meet one after the other."""


def scaling_kind(scaling: Mapping[str, Any]) -> str:
    """The name of a ``rope_scaling`` entry; older files say ``type``, newer ``rope_type``."""
    kind = str(scaling.get("rope_type", scaling.get("type", "default")) or "default")
    return OLD_KINDS.get(kind, kind)


def regimes_of(rope: RopeConfig) -> PositionRegimes | None:
    """Which lengths of a sequence turn alike; None where all do.

    longrope has a second set of factors beyond the original context, dynamic NTK another base for each
    length beyond `max_position_embeddings` (transformers takes no other border for it).
    """
    kind = scaling_kind(rope.scaling)
    if kind == "longrope" and "long_factor" in rope.scaling:
        return PositionRegimes(int(_original_length(rope)))
    if kind == "dynamic":
        return PositionRegimes(_dynamic_border(rope), 1)
    return None


def longest(rope: RopeConfig, positions: int) -> int:
    """The longest context, where the configuration states ``positions``.

    Dynamic NTK stretches what it states by its factor. longrope without long factors ends where it would
    need them.
    """
    kind = scaling_kind(rope.scaling)
    if kind == "dynamic":
        return max(int(_dynamic_border(rope) * _dynamic_factor(rope)), positions)
    if kind == "longrope" and "long_factor" not in rope.scaling:
        return min(int(_original_length(rope)), positions)
    return positions


def frequencies(rope: RopeConfig, factors: F32 | None = None, regime: int = 0) -> tuple[F32, float]:
    """Inverse frequencies and the factor on cos and sin.

    Args:
        rope: base, dimension and scaling.
        factors: divisors per frequency that a file carries, float32 ``[rotary_dim / 2]``.
        regime: which regime of `regimes_of`; 0 up to its border.

    Returns:
        float32 ``[rotary_dim / 2]`` radians per position, and the attention factor (1 except yarn).

    Raises:
        UnsupportedModelError: an unknown scaling kind.
    """
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    plain = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if factors is not None:
        return (plain / factors).astype(np.float32), 1.0
    kind = scaling_kind(rope.scaling)
    try:
        if kind == "default":
            return plain, 1.0
        if kind == "dynamic":
            return _dynamic(plain, rope, regime), 1.0
        if kind == "linear":
            return (plain / np.float32(rope.scaling["factor"])).astype(np.float32), 1.0
        if kind == "proportional":
            return _proportional(plain, rope), 1.0
        if kind == "llama3":
            return _llama3(plain, rope), 1.0
        if kind == "yarn":
            return _yarn(plain, rope)
        if kind == "longrope":
            return _longrope(plain, rope, regime)
    except KeyError as missing:
        raise ModelError(f"rope_scaling of kind {kind} lacks the field {missing}") from None
    raise UnsupportedModelError(
        f"rope scaling kind {kind!r} is not one that kvern computes ({', '.join(SCALING_KINDS)})"
    )


def _original_length(rope: RopeConfig) -> float:
    length = rope.scaling.get("original_max_position_embeddings", rope.original_max_positions)
    if length is None:
        raise KeyError("original_max_position_embeddings")
    return float(length)


def _llama3(plain: F32, rope: RopeConfig) -> F32:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a blend between."""
    factor = float(rope.scaling["factor"])
    low, high = float(rope.scaling["low_freq_factor"]), float(rope.scaling["high_freq_factor"])
    turns = _original_length(rope) * plain / np.float32(2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    blended: F32 = ((1 - blend) * plain / np.float32(factor) + blend * plain).astype(np.float32)
    return blended


def _proportional(plain: F32, rope: RopeConfig) -> F32:
    """Gemma 4: only the first share of the frequencies turns, the others stand still."""
    num_turning = int(float(rope.scaling.get("partial_rotary_factor", 1.0)) * rope.rotary_dim // 2)
    turning = np.where(np.arange(len(plain)) < num_turning, plain, np.float32(0))
    return (turning / np.float32(rope.scaling.get("factor", 1.0))).astype(np.float32)


def _dynamic_border(rope: RopeConfig) -> int:
    if rope.original_max_positions is None:
        raise KeyError("max_position_embeddings")
    return int(rope.original_max_positions)


def _dynamic_factor(rope: RopeConfig) -> float:
    factor = rope.scaling.get("factor")
    if factor is None:
        raise ModelError("rope_scaling of kind dynamic lacks the field 'factor'")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor < 1:
        raise ModelError(
            f"rope_scaling of kind dynamic has factor {factor!r}: it must be at least 1"
        )
    return float(factor)


def _dynamic(plain: F32, rope: RopeConfig, regime: int) -> F32:
    """Dynamic NTK scaling: the base grows with the length, so that the slowest turn spans it.

    base' = base * (factor * length / border - (factor - 1)) ** (dim / (dim - 2)), as transformers has it.
    """
    factor, border, dim = _dynamic_factor(rope), _dynamic_border(rope), rope.rotary_dim
    if regime == 0 or factor == 1 or dim <= 2:
        return plain
    stretch = np.float32(factor * (border + regime) / border - (factor - 1))
    base = np.float32(rope.theta) * stretch ** np.float32(dim / (dim - 2))
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (1.0 / base**exponents).astype(np.float32)


def _longrope(plain: F32, rope: RopeConfig, regime: int) -> tuple[F32, float]:
    """LongRoPE (Ding et al. 2024): short factors within the original context, long ones beyond."""
    name = "long_factor" if regime else "short_factor"
    factors = np.asarray(rope.scaling[name], np.float32)
    if factors.shape != plain.shape:
        raise ModelError(
            f"rope_scaling has {factors.size} numbers in {name}, "
            f"and {plain.size} frequencies need one each"
        )
    given = rope.scaling.get("attention_factor")
    if given is not None:
        return (plain / factors).astype(np.float32), float(given)
    length = _original_length(rope)
    factor = float(rope.scaling.get("factor") or (rope.original_max_positions or length) / length)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return (plain / factors).astype(np.float32), magnitude


def _yarn(plain: F32, rope: RopeConfig) -> tuple[F32, float]:
    """YaRN (Peng et al. 2023, section 3.2): interpolate by wavelength, and scale attention."""
    scaling, dim = rope.scaling, rope.rotary_dim
    factor = float(scaling["factor"])
    length = _original_length(rope)

    def dim_of(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dim_of(float(scaling.get("beta_fast", 32)))
    high = dim_of(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    keep = (1 - np.clip(ramp, 0, 1)).astype(np.float32)
    inverse = (plain / np.float32(factor) * (1 - keep) + plain * keep).astype(np.float32)
    return inverse, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(float(scaling["mscale"])) / magnitude(float(scaling["mscale_all_dim"]))
    return magnitude(1.0)


class RopeTable:
    """cos and sin for positions 0, 1, ... in the first regime; grows by doubling up to what a step needs.

    Rows of sequences in other regimes are computed per step: they turn once and are not met again.
    """

    def __init__(self, rope: RopeConfig, factors: F32 | None = None) -> None:
        """Args: rope: which rotation; factors: see `frequencies`."""
        self._rope = rope
        self._factors = factors
        self._has_regimes = regimes_of(rope) is not None
        self.inverse_frequencies, self.attention_factor = frequencies(rope, factors)
        self.cos = self.sin = np.empty((0, len(self.inverse_frequencies)), np.float32)
        self._of_regime: dict[int, F32] = {0: self.inverse_frequencies}
        self._step: tuple[I32, I32, F32, F32] | None = None

    def cover(self, num_positions: int) -> tuple[F32, F32]:
        """Cos and sin of the first regime, float32 ``[at least num_positions, rotary_dim / 2]``."""
        if num_positions > len(self.cos):
            count = max(MINIMUM_ROWS, 1 << (num_positions - 1).bit_length())
            positions = np.arange(count, dtype=np.float32)[:, None]
            self.cos, self.sin = self._turned(positions * self.inverse_frequencies)
        return self.cos, self.sin

    def of_step(self, batch: AttendBatch, num_positions: int) -> tuple[I32, F32, F32]:
        """Which row of which cos and sin turns each token of a step.

        Args:
            batch: its rows, positions and regimes.
            num_positions: one more than the last position.

        Returns:
            int32 ``[T]`` and two float32 ``[rows, rotary_dim / 2]``.
        """
        positions, regimes = batch.positions, batch.regimes
        if regimes is None or not self._has_regimes:
            return positions, *self.cover(num_positions)
        known = self._step
        if known is None or not (
            np.array_equal(known[0], positions) and np.array_equal(known[1], regimes)
        ):
            met, which = np.unique(regimes, return_inverse=True)
            rates = np.stack([self._frequencies_of(regime) for regime in met.tolist()])[which]
            cos, sin = self._turned(positions[:, None].astype(np.float32) * rates)
            known = self._step = (positions.copy(), regimes.copy(), cos, sin)
        return np.arange(len(positions), dtype=np.int32), known[2], known[3]

    def _turned(self, angles: F32) -> tuple[F32, F32]:
        factor = np.float32(self.attention_factor)
        return np.cos(angles) * factor, np.sin(angles) * factor

    def _frequencies_of(self, regime: int) -> F32:
        found = self._of_regime.get(regime)
        if found is None:
            if len(self._of_regime) > MAX_REMEMBERED:
                self._of_regime = {0: self.inverse_frequencies}
            found, _ = frequencies(self._rope, self._factors, regime)
            self._of_regime[regime] = found
        return found
