"""How long a model's context is once its rotary scaling is counted in."""

from __future__ import annotations

from collections.abc import Mapping

from kvern.spec.configs.reader import Config
from kvern.spec.regimes import PositionRegimes

LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "model_max_length",
    "n_ctx",
)

_STATED_EXTENDED = ("default", "llama3", "longrope", "su", "mrope", "proportional")
"""Kinds whose `max_position_embeddings` already is the extended length."""


def rope_scaling(config: Config) -> Mapping[str, object]:
    """The scaling table of full-attention layers, in either spelling; empty without scaling."""
    table = config.get("rope_scaling", "rope_parameters")
    if not isinstance(table, Mapping):
        return {}
    nested = table.get("full_attention")
    return nested if isinstance(nested, Mapping) else table


def max_model_len(config: Config, family: str) -> int | None:
    """The context limit in tokens, or None where the configuration does not state one.

    YaRN, linear and dynamic scaling multiply the original length, which is
    `original_max_position_embeddings` where stated; the Gemma families state the product.
    """
    length = config.optional_integer(*LENGTH_FIELDS)
    scaling = rope_scaling(config)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = scaling.get("factor")
    if length is None or kind in _STATED_EXTENDED or family.startswith("gemma"):
        return length
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 0:
        return length
    original = scaling.get("original_max_position_embeddings")
    return int((original if isinstance(original, int) else length) * factor)


def position_regimes(config: Config, family: str) -> PositionRegimes | None:
    """Which lengths of a sequence turn alike, where that depends on the length; else None.

    longrope has a second set of factors beyond the original length, dynamic NTK another base for each length
    beyond the stated one.
    """
    length, context = config.optional_integer(*LENGTH_FIELDS), max_model_len(config, family)
    if length is None or context is None:
        return None
    scaling = rope_scaling(config)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "dynamic":
        return PositionRegimes(length, 1) if length < context else None
    if kind not in ("longrope", "su") or "long_factor" not in scaling:
        return None
    border = config.optional_integer("original_max_position_embeddings")
    if border is None:
        stated = scaling.get("original_max_position_embeddings")
        border = stated if isinstance(stated, int) else length
    return PositionRegimes(border) if border < context else None
