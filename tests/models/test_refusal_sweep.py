"""Every model type that transformers knows is accepted, or refused in one sentence that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.models.cases import CASES

from kvern.errors import KvernError
from kvern.models.families import FAMILIES, family_of
from kvern.spec.configs import load_model_spec

pytestmark = pytest.mark.full

TEXT_PARTS = frozenset(
    architecture
    for family in FAMILIES
    for architecture in family.architectures
    if architecture.endswith("ForConditionalGeneration")
)
"""Models with pictures or sound, of which kvern runs the text model; that one has its own case."""


def default_configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Of every model type, with the causal model's class as its architecture where there is one."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    transformers.logging.set_verbosity_error()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for model_type in transformers.CONFIG_MAPPING:
        try:
            config = transformers.CONFIG_MAPPING[model_type]().to_dict()
        except Exception:  # a class without usable defaults
            continue
        architecture = names.get(model_type)
        if isinstance(architecture, list | tuple):
            architecture = architecture[0]
        architectures = [] if architecture is None else [architecture]
        yield model_type, {**config, "model_type": model_type, "architectures": architectures}


def answer(read: Callable[[], object]) -> str | None:
    """The sentence of a refusal; None where the configuration is accepted."""
    try:
        read()
    except KvernError as refused:
        return str(refused)
    return None


def test_every_model_type_is_accepted_or_refused_in_one_sentence() -> None:
    untested, number = set(), 0
    tested = {case.model for case in CASES} | TEXT_PARTS
    for model_type, config in default_configurations():
        described = answer(lambda c=config, m=model_type: load_model_spec(c, m))
        decoded = answer(lambda c=config: family_of(c).describe(c))
        for refusal in (described, decoded):
            assert refusal is None or ("\n" not in refusal and len(refusal) > 20), model_type
        assert described is None or model_type in described
        if decoded is None:
            untested |= set(config["architectures"]) - tested
        number += 1
    assert number > 300
    assert not untested, "an architecture counts only with its exactness test"


def test_encoders_and_prefix_masks_are_refused_with_the_reason() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    auto = transformers.models.auto.modeling_auto
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    encoders = set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) - set(causal)
    refused = 0
    for model_type, config in default_configurations():
        if model_type in encoders:
            for read in (load_model_spec, family_of):
                refusal = answer(lambda r=read, c=config: r(c))
                assert refusal is not None, model_type
                assert "direction" in refusal or "encoded input" in refusal, (model_type, refusal)
            refused += 1
    assert refused > 25


def test_every_architecture_of_a_decoder_has_its_case() -> None:
    tested = {case.model for case in CASES} | TEXT_PARTS
    assert {name for family in FAMILIES for name in family.architectures} <= tested
