"""Configurations in the older spelling, as most published folders have it, describe the same decoder."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.models.cases import CASES
from tests.models.harness import SavedModels

from kvern.models.config import DecoderConfig, RopeConfig
from kvern.models.families import family_of
from kvern.models.rope import scaling_kind

Config = dict[str, Any]
Older = Callable[[Config], None]


def flat_rope(config: Config) -> None:
    """rope_theta and rope_scaling beside each other, the kind called "type"."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    partial = rope.pop("partial_rotary_factor", None)
    if partial is not None:
        config["partial_rotary_factor"] = partial
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}


def two_bases(config: Config) -> None:
    """Gemma 3 before layer_types: a period, and a second base."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config["sliding_window_pattern"] = 6
    config.pop("layer_types")


def rotary_pct(config: Config) -> None:
    rope = config.pop("rope_parameters")
    config["rotary_pct"] = rope["partial_rotary_factor"]
    config["rotary_emb_base"] = rope["rope_theta"]


def short_unscaled(config: Config) -> None:
    """longrope under its first name."""
    flat_rope(config)
    config["rope_scaling"]["type"] = "su"


def no_layer_types(config: Config) -> None:
    config.pop("layer_types")
    flat_rope(config)


SPELLINGS: list[tuple[str, Older]] = [
    ("mistral", flat_rope),
    ("ministral3", flat_rope),
    ("qwen3", flat_rope),
    ("qwen2-window", no_layer_types),
    ("gemma2", no_layer_types),
    ("gemma3", two_bases),
    ("phi3", flat_rope),
    ("phi3-longrope", short_unscaled),
    ("pythia", rotary_pct),
    ("gpt-oss", no_layer_types),
    ("llama4", no_layer_types),
    ("deepseek-v2", flat_rope),
    ("deepseek-v3", flat_rope),
    ("qwen3-next", no_layer_types),
    ("glm-4.5", flat_rope),
]


def comparable(decoder: DecoderConfig) -> DecoderConfig:
    """The decoder with what a rotary scaling says, whatever it is called."""

    def plain(rope: RopeConfig | None) -> RopeConfig | None:
        if rope is None:
            return None
        kind = scaling_kind(rope.scaling)
        ignored = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
        rest = {k: v for k, v in rope.scaling.items() if k not in ignored}
        return replace(rope, scaling={"kind": kind, **(rest if kind != "default" else {})})

    layers = (replace(layer, rope=plain(layer.rope)) for layer in decoder.layers)
    return replace(decoder, layers=tuple(layers))


@pytest.mark.parametrize(("family", "older"), SPELLINGS, ids=[f for f, _ in SPELLINGS])
def test_the_older_spelling_describes_the_same_decoder(
    saved: SavedModels, family: str, older: Older
) -> None:
    folder = saved(next(case for case in CASES if case.family == family)).folder
    config = json.loads((folder / "config.json").read_text())
    described = family_of(config).describe(copy.deepcopy(config))
    older(config)
    assert "rope_parameters" not in config
    assert comparable(family_of(config).describe(config)) == comparable(described)
