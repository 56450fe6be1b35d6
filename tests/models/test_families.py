"""Every family that has a decoder, by the shared exactness test.

Tiny models of its own configuration class, and of a real configuration, layers and widths cut.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.models.cases import CASES, IDS
from tests.models.harness import (
    Case,
    SavedModels,
    backend_of,
    check_exactness,
    decoder_of,
)

from kvern.errors import UnsupportedModelError
from kvern.models.caches import require_same_caches
from kvern.models.families import family_of
from kvern.spec.configs import load_model_spec, read_config

BACKENDS = ["reference", "native"]
REAL = [case for case in CASES if case.real is not None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_logits_agree_with_transformers(
    saved: SavedModels, case: Case, backend: str, request: pytest.FixtureRequest
) -> None:
    model = saved(case, False)
    check_exactness(decoder_of(model.folder, backend_of(backend, request)), model.logits)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", REAL, ids=[case.family for case in REAL])
def test_real_configurations_agree_with_transformers(
    saved: SavedModels, case: Case, backend: str, request: pytest.FixtureRequest
) -> None:
    model = saved(case, True)
    check_exactness(decoder_of(model.folder, backend_of(backend, request)), model.logits)


@pytest.mark.parametrize(
    ("case", "is_real"),
    [(case, False) for case in CASES] + [(case, True) for case in REAL],
    ids=IDS + [f"{case.family}-real" for case in REAL],
)
def test_the_cache_description_is_what_the_decoder_needs(
    saved: SavedModels, case: Case, is_real: bool
) -> None:
    folder = saved(case, is_real).folder
    config = read_config(folder)
    require_same_caches(family_of(config).describe(config), load_model_spec(folder))


def test_a_description_that_differs_is_refused_before_the_model_runs(saved: SavedModels) -> None:
    folder = saved(next(case for case in CASES if case.family == "gemma3")).folder
    config = read_config(folder)
    spec = load_model_spec({**config, "sliding_window": 8})
    with pytest.raises(UnsupportedModelError, match="layer 0 needs"):
        require_same_caches(family_of(config).describe(config), spec)
    fewer = replace(spec, layers=spec.layers[:5])
    with pytest.raises(UnsupportedModelError, match="has 6 layers, its cache description 5"):
        require_same_caches(family_of(config).describe(config), fewer)
