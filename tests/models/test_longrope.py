"""longrope: the short factors up to the original context, the long ones for every key beyond it.

The reference for position p is a forward pass of exactly p + 1 tokens, so a sequence that crosses the
border is computed anew with the long factors.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.models.cases import CASES
from tests.models.harness import (
    SavedModels,
    alone,
    assert_agrees,
    backend_of,
    decoder_of,
    random_ids,
    run,
)

from kvern.spec.regimes import PositionRegimes

CASE = next(case for case in CASES if case.family == "phi3-longrope")
BORDER = 64


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_each_side_of_the_border_has_its_own_factors(
    saved: SavedModels, backend: str, request: pytest.FixtureRequest
) -> None:
    model = saved(CASE)
    decoder = decoder_of(model.folder, backend_of(backend, request))
    assert decoder.config.max_positions == 256
    assert decoder.config.regimes == PositionRegimes(BORDER)
    ids = random_ids(decoder, 100)
    for length in (BORDER - 1, BORDER, BORDER + 1, 100):
        regime = int(length > BORDER)
        theirs = model.logits(ids[:length])
        for schedule in (alone(length), alone(30, 1, 1, length - 32)):
            ours = run(decoder, [ids[:length]], schedule, [regime])[0]
            assert_agrees(ours, theirs)
    short, long = model.logits(ids[:BORDER]), model.logits(ids[: BORDER + 1])
    assert np.abs(short - long[:BORDER]).max() > 0.1


def test_sequences_on_both_sides_share_a_step(
    saved: SavedModels, request: pytest.FixtureRequest
) -> None:
    model = saved(CASE)
    decoder = decoder_of(model.folder, backend_of("native", request))
    ids = random_ids(decoder, 100)
    few = ids[:40]
    schedule = [[(0, 90), (1, 20)], [(1, 19), (0, 9)], [(0, 1), (1, 1)]]
    ours = run(decoder, [ids, few], schedule, [1, 0])
    assert_agrees(ours[0], model.logits(ids))
    assert_agrees(ours[1], model.logits(few))
    assert np.array_equal(ours[0], run(decoder, [ids], alone(100), [1])[0])
    assert np.array_equal(ours[1], run(decoder, [few], alone(40), [0])[0])
