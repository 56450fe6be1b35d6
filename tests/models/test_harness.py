"""The exactness test must be able to fail: decoders with a planted fault do not pass it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.models import harness
from tests.models.cases import CASES
from tests.models.harness import SavedModels, backend_of, check_exactness, decoder_of

from kvern.kernels.family_protocol import ExpertParts
from kvern.kernels.protocol import AttendBatch
from kvern.models.decoder import Decoder
from kvern.models.recurrent import DeltaNet

Plant = Callable[[Decoder, pytest.MonkeyPatch], None]


def mixers(decoder: Decoder) -> list[Any]:
    return [layer.mixer for layer in decoder.layers]


def wider_window(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    for mixer in mixers(decoder):
        if mixer.params.window is not None:
            mixer.params = replace(mixer.params, window=mixer.params.window + 1)


def no_sinks(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    for mixer in mixers(decoder):
        mixer.params = replace(mixer.params, sink_logits=None)


def wrong_scale(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    for mixer in mixers(decoder):
        mixer.params = replace(mixer.params, scale=mixer.params.scale * 1.01)


def restarting_positions(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    usual = harness.Pool.batch

    def batch(pool: harness.Pool, rows: Any) -> AttendBatch:
        made = usual(pool, rows)
        made.positions = np.concatenate([np.arange(n, dtype=np.int32) for _, _, n in rows])
        return made

    patch.setattr(harness.Pool, "batch", batch)


def forgetful_state(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    for mixer in mixers(decoder):
        if isinstance(mixer, DeltaNet):
            mixer.weights.decay = mixer.weights.decay * np.float32(1.05)


def swapped_experts(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    for layer in decoder.layers:
        part: Any = layer.feed_forward
        parts: ExpertParts = part.weights.experts
        part.weights.experts = replace(parts, gate_up=parts.gate_up[::-1], down=parts.down[::-1])


FAULTS: list[tuple[str, Plant]] = [
    ("gemma3", wider_window),
    ("gpt-oss", no_sinks),
    ("deepseek-v2-lite", wrong_scale),
    ("qwen3", restarting_positions),
    ("qwen3-next", forgetful_state),
    ("mixtral", swapped_experts),
]


@pytest.mark.parametrize(("family", "plant"), FAULTS, ids=[f"{n}-{p.__name__}" for n, p in FAULTS])
def test_a_planted_fault_is_found(
    saved: SavedModels,
    family: str,
    plant: Plant,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    model = saved(next(case for case in CASES if case.family == family))
    decoder = decoder_of(model.folder, backend_of("reference", request))
    plant(decoder, monkeypatch)
    with pytest.raises(AssertionError):
        check_exactness(decoder, model.logits)


def test_other_bits_are_found_where_a_backend_promises_the_same(
    saved: SavedModels, request: pytest.FixtureRequest
) -> None:
    """The reference backend calls BLAS, whose bits depend on the number of rows."""
    model = saved(next(case for case in CASES if case.family == "qwen3"))
    backend = backend_of("reference", request)
    backend.row_invariant = True
    with pytest.raises(AssertionError):
        check_exactness(decoder_of(model.folder, backend), model.logits)
