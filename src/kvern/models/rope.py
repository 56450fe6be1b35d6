"""Rotary frequencies and their cos/sin tables; length-dependent kinds as for short sequences.

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

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

SCALING_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
OLD_KINDS = {"su": "longrope", "mrope": "default"}
"""Names of older files. mrope turns text by its position alone."""
LENGTH_DEPENDENT = ("longrope", "dynamic")
MINIMUM_ROWS = 4096


def scaling_kind(scaling: Mapping[str, Any]) -> str:
    """The name of a ``rope_scaling`` entry; older files say ``type``, newer ``rope_type``."""
    kind = str(scaling.get("rope_type", scaling.get("type", "default")) or "default")
    return OLD_KINDS.get(kind, kind)


def length_limit(rope: RopeConfig) -> int | None:
    """Positions up to which frequencies are those of short sequences; None where they never change.

    longrope and dynamic NTK change every key's rotation once a sequence is longer than the original
    context; the cache of a shorter one would then be wrong, so the context ends there.
    """
    if scaling_kind(rope.scaling) not in LENGTH_DEPENDENT:
        return None
    return int(_original_length(rope))


def num_regimes(rope: RopeConfig) -> int:
    """2 where sequences beyond the original context turn otherwise (longrope), else 1."""
    is_long = scaling_kind(rope.scaling) == "longrope" and "long_factor" in rope.scaling
    return 2 if is_long else 1


def frequencies(rope: RopeConfig, factors: F32 | None = None, regime: int = 0) -> tuple[F32, float]:
    """Inverse frequencies and the factor on cos and sin.

    Args:
        rope: base, dimension and scaling.
        factors: divisors per frequency that a file carries, float32 ``[rotary_dim / 2]``.
        regime: 0 up to the original context, 1 beyond (longrope).

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
        if kind in ("default", "dynamic"):
            return plain, 1.0
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
    """cos and sin for positions 0, 1, ...; grows by doubling up to what a step needs.

    With several regimes the row of position p in regime r is ``p * num_regimes + r``.
    """

    def __init__(self, rope: RopeConfig, factors: F32 | None = None) -> None:
        """Args: rope: which rotation; factors: see `frequencies`."""
        self.num_regimes = num_regimes(rope)
        rates = [frequencies(rope, factors, regime) for regime in range(self.num_regimes)]
        self.inverse_frequencies = np.stack([inverse for inverse, _ in rates])
        self.attention_factor = rates[0][1]
        self.cos = self.sin = np.empty((0, self.inverse_frequencies.shape[1]), np.float32)

    def cover(self, num_positions: int) -> tuple[F32, F32]:
        """Cos and sin, float32 ``[at least num_positions * num_regimes, rotary_dim / 2]``."""
        if num_positions * self.num_regimes > len(self.cos):
            count = max(MINIMUM_ROWS, 1 << (num_positions - 1).bit_length())
            positions = np.arange(count, dtype=np.float32)[:, None, None]
            angles = (positions * self.inverse_frequencies).reshape(count * self.num_regimes, -1)
            factor = np.float32(self.attention_factor)
            self.cos, self.sin = np.cos(angles) * factor, np.sin(angles) * factor
        return self.cos, self.sin

    def rows(self, batch: AttendBatch) -> I32:
        """Which row turns each token of a step."""
        if self.num_regimes == 1:
            return batch.positions
        rows = batch.positions * np.int32(self.num_regimes)
        return rows if batch.regimes is None else rows + batch.regimes
