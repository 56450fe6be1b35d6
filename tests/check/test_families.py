"""The doctor on small models of every family: windows, chunks, latent vectors, experts, states."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.cases import CASES
from tests.models.harness import Case, save_model

from kvern import LLM
from kvern.check.doctor import check
from kvern.check.lab import CheckOptions
from kvern.check.report import report_lines

TYPICAL = ("gemma3", "llama4", "deepseek-v2", "qwen3-next")
"""One each with windows, chunks, latent attention and states."""
OTHERS = [case for case in CASES if case.family not in TYPICAL]


def expect_healthy(folder: Path, case: Case) -> None:
    save_model(folder, case)
    with LLM(folder, kv_memory="4MiB", kv_format="fp32", block_size=4) as llm:
        report = check(llm, CheckOptions(is_quick=True))
    assert report.is_healthy, report_lines(report)
    assert report.tolerance == 0


@pytest.mark.usefixtures("require_native")
@pytest.mark.parametrize("family", TYPICAL)
def test_typical_families_are_healthy(tmp_path: Path, family: str) -> None:
    expect_healthy(tmp_path, next(case for case in CASES if case.family == family))


@pytest.mark.full
@pytest.mark.usefixtures("require_native")
@pytest.mark.parametrize("case", OTHERS, ids=[case.family for case in OTHERS])
def test_every_other_family_is_healthy(tmp_path: Path, case: Case) -> None:
    expect_healthy(tmp_path, case)


@pytest.mark.usefixtures("require_native")
@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3", "gemma4"])
def test_experts_near_a_tie_are_left_out_and_counted_in_the_default_format(
    tmp_path: Path, family: str
) -> None:
    """A last bit of bf16 may choose another expert: no fault, and no reason to allow everything."""
    save_model(tmp_path, next(case for case in CASES if case.family == family))
    with LLM(tmp_path, kv_memory="4MiB", block_size=4) as llm:
        report = check(llm, CheckOptions(is_quick=True), only=["decode"])
        experts = [
            getattr(layer.feed_forward, "on_margin", None) for layer in llm.model.decoder.layers
        ]
    assert report.is_healthy, report_lines(report)
    assert experts == [None] * len(experts)  # nobody is left listening
    assert "limit 5e-02" in report.cases[0].note
