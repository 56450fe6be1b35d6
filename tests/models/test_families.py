"""Every family that has a decoder, by the shared exactness test.

Tiny models of its own configuration class, and of a real configuration, layers and widths cut.
"""

from __future__ import annotations

import pytest
from tests.models.cases import CASES, IDS
from tests.models.harness import (
    Case,
    SavedModels,
    backend_of,
    check_exactness,
    decoder_of,
    state_shapes,
)

from kvern.models.config import LayerConfig
from kvern.models.families import family_of
from kvern.spec.configs import load_model_spec, read_config
from kvern.spec.content import Heads, Latent, State
from kvern.spec.reach import All, Chunk, Last, Reach, Window

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


def needed(layer: LayerConfig, hidden_size: int) -> tuple[object, Reach] | None:
    """What a decoder layer leaves in the cache; None for nothing of its own."""
    if layer.state is not None:
        return state_shapes(layer, hidden_size), Last()
    if not layer.has_mixer or layer.share_with is not None:
        return None
    reach: Reach = All()
    if layer.window is not None:
        reach = Window(layer.window)
    if layer.chunk is not None:
        reach = Chunk(layer.chunk)
    if layer.latent is not None:
        return Latent(layer.latent.latent_dim, layer.latent.rope_dim), reach
    return Heads(layer.num_kv_heads, layer.key_dim, layer.value_dim), reach


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
    decoder, spec = family_of(config).describe(config), load_model_spec(folder)
    for layer, described in zip(decoder.layers, spec.layers, strict=True):
        own = [cache for cache in described.caches if cache.share_with is None]
        stated = None
        if own:
            [cache] = own
            content: object = cache.content
            if isinstance(content, State):
                content = [(part.name, part.shape) for part in content.parts]
            stated = content, cache.reach
        assert stated == needed(layer, decoder.hidden_size)
        shared = {cache.share_with for cache in described.caches} - {None}
        assert shared == ({layer.share_with} - {None})
