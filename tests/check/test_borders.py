"""The border cases leave the window, and see what goes wrong only there."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import write_tiny_model

from kvern import LLM
from kvern.check.doctor import check
from kvern.check.lab import CheckOptions
from kvern.kernels.protocol import AttendBatch, AttendParams

WINDOW = 24
ONLY = ["border-24"]


@pytest.fixture(scope="module")
def window_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return write_tiny_model(tmp_path_factory.mktemp("window"), **kind, sliding_window=WINDOW)


def engine(folder: Path) -> LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LLM(folder, kv_memory="1MiB", block_size=4, max_model_len=512)


class NarrowerWhenAlone:
    """A backend whose window is one key too narrow in steps of a single row."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attend(
        self, q: Any, keys: Any, values: Any, batch: AttendBatch, params: AttendParams, out: Any
    ) -> int:
        if len(q) == 1 and params.window is not None:
            params = replace(params, window=params.window - 1)
        count: int = self.inner.attend(q, keys, values, batch, params, out)
        return count


def test_a_healthy_window_passes_around_its_border(window_model: Path) -> None:
    with engine(window_model) as llm:
        report = check(llm, CheckOptions(is_quick=True), only=ONLY)
    assert report.is_healthy
    (case,) = [case for case in report.cases if case.name == "border-24"]
    assert case.num_compared > 3 * WINDOW


def test_a_window_that_is_off_by_one_in_decode_fails_there(window_model: Path) -> None:
    def tamper(llm: LLM) -> None:
        llm.model.decoder.backend = NarrowerWhenAlone(llm.model.decoder.backend)

    with engine(window_model) as llm:
        report = check(llm, CheckOptions(is_quick=True), only=ONLY, tamper=tamper)
    verdicts = {case.name: case.verdict for case in report.cases}
    assert verdicts["border-24"] == "fail"


def test_a_model_without_borders_has_no_such_case(small_model: Path) -> None:
    with engine(small_model) as llm:
        report = check(llm, CheckOptions(is_quick=True), only=["decode"])
    assert not [case.name for case in report.cases if case.name.startswith("border")]
