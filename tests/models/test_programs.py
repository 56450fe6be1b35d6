"""Every family's step is recorded, and a repeated step gives the bits of its operations one by one."""

from __future__ import annotations

import numpy as np
import pytest
from tests.models.cases import CASES
from tests.models.harness import Case, Pool, SavedModels, backend_of, decoder_of

from kvern.models.decoder import Decoder
from kvern.models.workspace import Workspace

NOT_RECORDED = ("gemma3n",)
"""What numpy adds between their operations: gates cut to sparsity, parallel residual streams."""

STEPS = [
    [(0, 0, 3)],  # recorded, and compared with its repetition
    [(0, 3, 1)],  # compared for a single row
    [(0, 4, 2), (1, 0, 5)],
    [(0, 6, 1), (1, 5, 1)],
    [(1, 6, 1)],
    [(1, 7, 6), (0, 7, 1)],
    [(0, 8, 9)],
]
"""(sequence, first position, tokens) of each sequence of a step."""


def hidden_states(decoder: Decoder) -> tuple[list[bytes], list[bytes], Workspace]:
    """Results of all steps, the states' pages behind them, and the workspace."""
    pool, workspace = Pool(decoder, [20, 20]), Workspace(decoder.config, 16)
    results = []
    for parts in STEPS:
        count = sum(n for _, _, n in parts)
        tokens = np.random.default_rng(len(results)).integers(0, decoder.config.vocab_size, count)
        batches = [pool.batch(parts), pool.state_batch(parts)]
        hidden, _ = decoder.forward(tokens.astype(np.int32), batches, pool.cache, workspace)
        results.append(hidden.tobytes())
    pages = [cache.state.pages.tobytes() for cache in pool.cache if cache.state is not None]
    return results, pages, workspace


@pytest.mark.parametrize("case", CASES, ids=[case.family for case in CASES])
def test_a_recorded_step_has_the_same_bits(
    case: Case, saved: SavedModels, request: pytest.FixtureRequest
) -> None:
    decoder = decoder_of(saved(case).folder, backend_of("native", request))
    repeated, pages, workspace = hidden_states(decoder)
    recorded = workspace.recorded
    if case.family in NOT_RECORDED:
        assert recorded.program is None
        return
    assert recorded.program is not None
    assert recorded.verified == {True, False}
    decoder._recorder = None
    one_by_one, own_pages, workspace = hidden_states(decoder)
    assert workspace.recorded.program is None
    assert repeated == one_by_one
    assert pages == own_pages
