from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvern import LLM, SamplingParams
from kvern.bench.breakdown import DECODER, PARTIES, Accountant
from kvern.bench.limits import Limits, best_of, measure_limits
from kvern.bench.recording import Recorder, Step, TimedBackend

LIMITS = Limits("test", 2, 1e9, 4e9, 2e9, 1e9)
NEW_TOKENS, PROMPT = 5, list(range(100, 140))


@pytest.fixture(scope="module")
def recorded(tiny_model: Path) -> dict[str, Any]:
    """The phases of one request on the reference backend, whose weights are float32."""
    options = {"backend": "reference", "kv_memory": "1MiB", "kv_format": "fp32"}
    with LLM(tiny_model, **options) as llm:
        original = llm.model.runner.decoder.backend
        timed, untouched = (run(llm, times_calls) for times_calls in (True, False))
        assert llm.model.runner.decoder.backend is original
        assert "execute" not in vars(llm.model.runner)
        return {
            "phases": Accountant(LIMITS, "fp32", 10**9).phases(timed, untouched),
            "timed": timed,
            "untouched": untouched,
            "work": llm.work,
            "config": llm.model.decoder.config,
        }


def run(llm: LLM, times_calls: bool) -> list[Step]:
    llm.reset_cache()
    with Recorder(llm, times_calls) as recorder:
        llm.submit(PROMPT, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        while recorder.step():
            pass
    return recorder.steps


def test_steps_and_tokens_are_those_of_the_engine(recorded: dict[str, Any]) -> None:
    phases, work = recorded["phases"], recorded["work"]
    assert 2 * phases["all"].steps == work.steps == 2 * NEW_TOKENS
    assert 2 * phases["all"].tokens == work.tokens_processed
    assert all(step.calls for step in recorded["timed"])
    assert not any(step.calls for step in recorded["untouched"])
    assert [s.blocks_in_use for s in recorded["timed"]] == [
        3
    ] * NEW_TOKENS  # 40 to 44 tokens in 16s
    assert phases["prefill"].steps == 1 and phases["prefill"].tokens == len(PROMPT)
    assert phases["decode"].tokens == NEW_TOKENS - 1


def test_shares_add_up(recorded: dict[str, Any]) -> None:
    document = recorded["phases"]["all"].document()
    assert set(document["shares"]) == set(PARTIES)
    assert sum(document["shares"].values()) == pytest.approx(1.0)
    timed_s = sum(step.seconds for step in recorded["timed"])
    assert 0.2 * timed_s < document["seconds"] <= timed_s * 1.001
    assert document["bottleneck"] in PARTIES


def test_python_that_an_untouched_run_does_not_spend_is_taken_off(recorded: dict[str, Any]) -> None:
    accountant, timed = Accountant(LIMITS, "fp32", 10**9), recorded["timed"]
    slow = [dataclasses.replace(step, forward_s=9.0) for step in timed]
    quick = [dataclasses.replace(step, forward_s=0.0) for step in timed]
    most = accountant.phases(timed, slow)["all"]
    least = accountant.phases(timed, quick)["all"]
    assert most.parts_s[DECODER] > 0 == least.parts_s[DECODER]
    assert most.seconds - most.parts_s[DECODER] == pytest.approx(least.seconds)
    assert accountant.phases(timed, [])["all"].parts_s == most.parts_s


def test_bytes_and_operations_are_the_formula(recorded: dict[str, Any]) -> None:
    config, decode = recorded["config"], recorded["phases"]["decode"]
    layer = config.layers[0]
    keys = sum(range(len(PROMPT) + 1, len(PROMPT) + NEW_TOKENS))
    per_key = 2 * layer.num_kv_heads * layer.key_dim
    assert decode.kv_bytes == keys * per_key * 4 * len(config.layers)
    q_and_out = 2 * config.hidden_size * layer.num_heads * layer.key_dim
    matrices = (
        len(config.layers)
        * (
            q_and_out
            + config.hidden_size * per_key
            + 3 * config.hidden_size * layer.intermediate_size
        )
        + config.hidden_size * config.vocab_size
    )
    attention = 2 * keys * layer.num_heads * 2 * layer.key_dim * len(config.layers)
    assert decode.operations == 2 * matrices * (NEW_TOKENS - 1) + attention
    assert decode.weight_bytes == 4 * matrices * (NEW_TOKENS - 1)
    read_s = (decode.weight_bytes + decode.kv_bytes) / LIMITS.read_bytes_per_s
    assert decode.bound_s >= read_s * 0.999


def test_the_recorder_sees_what_the_backend_returns() -> None:
    class Backend:
        name = "fake"

        def double(self, x: int) -> int:
            time.sleep(0.002)
            return 2 * x

    timed = TimedBackend(Backend())
    assert timed.name == "fake"
    assert [timed.double(2), timed.double(3)] == [4, 6]
    first, second = timed.take()
    assert (first.name, first.args, first.result) == ("double", (2,), 4)
    assert first.ended_s - first.started_s >= 0.002
    assert second.started_s >= first.ended_s
    assert timed.take() == []


def test_limits_without_native_kernels() -> None:
    limits = measure_limits(2, None, seconds=0.002, read_bytes=2**20)
    assert limits.source == "numpy"
    assert limits.read_bytes_per_s > 1e6 and limits.arithmetic("fp32") > 1e6


@pytest.mark.usefixtures("require_native")
def test_limits_with_native_kernels() -> None:
    from kvern.kernels.native import available_kernel_paths

    for path in available_kernel_paths():
        limits = measure_limits(1, path, seconds=0.002, read_bytes=2**22)
        assert limits.source == f"native ({path})"
        assert all(np.isfinite(v) and v > 0 for k, v in limits.document().items() if k != "source")


def test_the_better_of_two_measurements_counts() -> None:
    other = Limits("test", 2, 2e9, 1e9, 3e9, 0.5e9)
    assert best_of(LIMITS, other) == Limits("test", 2, 2e9, 4e9, 3e9, 1e9)
