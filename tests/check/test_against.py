"""`kvern check --against transformers`: every way of computing, compared with another library's passes."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.cases import CASES
from tests.models.harness import Case, save_model

from kvern import LLM
from kvern.check import against
from kvern.check.against import EXACT_MARGIN, Margins, Transformers
from kvern.check.doctor import check_against
from kvern.check.faults.computing import top_left_mask
from kvern.check.lab import CheckOptions
from kvern.check.report import report_lines
from kvern.check.results import CheckReport
from kvern.cli.main import main
from kvern.errors import UsageError

TYPICAL = ("gemma3", "deepseek-v2", "qwen3-next", "phi3-longrope", "llama-dynamic")
"""Windows, a latent with experts, states with experts, two regimes, a regime per length."""
OTHERS = [case for case in CASES if case.family not in TYPICAL]

QUICK = CheckOptions(is_quick=True)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def case_of(family: str) -> Case:
    return next(case for case in CASES if case.family == family)


def compared(folder: Path, **options: Any) -> CheckReport:
    settings = {"kv_format": "fp32", "weights_format": "fp32", "kv_memory": "4MiB", "block_size": 4}
    with LLM(folder, **settings) as llm:
        config = llm.model.decoder.config
        oracle = Transformers(
            folder, config.vocab_size, depends_on_length=config.regimes is not None
        )
        return check_against(llm, oracle, QUICK, **options)


def expect_agreement(folder: Path, case: Case) -> CheckReport:
    save_model(folder, case)
    report = compared(folder)
    assert report.is_healthy, report_lines(report)
    assert report.tolerance == 2e-4
    assert report.reference.startswith("transformers 5")
    assert report.num_compared > 200
    names = {case.name for case in report.cases}
    assert {"chunk-all", "chunk-1", "decode", "orders", "full-hit", "preempt"} <= names
    return report


@pytest.mark.parametrize("family", TYPICAL)
def test_typical_families_agree_with_transformers(tmp_path: Path, family: str) -> None:
    report = expect_agreement(tmp_path, case_of(family))
    has_experts = family in ("deepseek-v2", "qwen3-next")
    assert has_experts or report.num_left_out == 0
    if family in ("gemma3", "phi3-longrope", "llama-dynamic"):
        (border,) = [case for case in report.cases if case.name.startswith("border")]
        assert (border.verdict, border.num_compared > 20) == ("pass", True)


@pytest.mark.full
@pytest.mark.parametrize("case", OTHERS, ids=[case.family for case in OTHERS])
def test_every_other_family_agrees_with_transformers(tmp_path: Path, case: Case) -> None:
    expect_agreement(tmp_path, case)


def test_a_fault_is_a_disagreement(tmp_path: Path) -> None:
    save_model(tmp_path, case_of("qwen3"))
    report = compared(tmp_path, only=["chunk-7"], tamper=top_left_mask)
    assert not report.is_healthy
    assert report.faults[0] == "disagrees"
    assert "transformers" in "\n".join(report_lines(report))


def test_positions_behind_a_near_tie_are_left_out_and_counted(tmp_path: Path) -> None:
    def flatten(model: Any) -> None:
        """Two equal experts in a row: every choice between them is a tie."""
        import torch

        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight[1] = layer.mlp.gate.weight[0]

    case = case_of("qwen3-moe")
    save_model(tmp_path, Case(case.family, case.model, case.fields, prepare=flatten))
    report = compared(tmp_path, only=["chunk-all"])
    assert report.num_left_out > 0
    assert report.is_healthy, report_lines(report)
    assert f"{report.num_left_out} behind near ties" in "\n".join(report_lines(report))


def test_margins_are_the_least_over_layers_and_end_at_the_first_tie() -> None:
    class Piece:
        start, length = 1, 3

    margins = Margins(4)
    margins.on_chunks([Piece()])  # type: ignore[list-item]
    margins.note(np.array([0.5, 0.2, 0.1], np.float32))
    margins.note(np.array([0.3, 0.4, 0.00001], np.float32))
    assert margins.least.tolist() == pytest.approx([np.inf, 0.3, 0.2, 0.00001])
    assert margins.first_unclear(EXACT_MARGIN) == 3
    assert margins.first_unclear(0.25) == 2
    assert margins.first_unclear(0.0) == 4


def test_the_command_prints_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path, case_of("gemma3"))
    flags = ["--quick", "--block-size", "4", "--against", "transformers"]
    assert main(["check", str(tmp_path), *flags]) == 0
    out = capsys.readouterr().out
    assert "The answers with the cache are the answers without it." in out
    assert "The answers are those of transformers 5" in out
    assert main(["check", str(tmp_path), *flags, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["reference"] == "full pass without a cache"
    assert document["against"]["healthy"] is True
    assert document["against"]["kv_format"] == "fp32"
    assert document["against"]["positions_left_out"] == 0


@pytest.mark.parametrize("missing", ["torch", "transformers", "gguf"])
def test_a_missing_package_is_one_sentence(
    missing: str,
    small_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name == missing:
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(against.importlib, "import_module", without)
    if missing == "gguf":
        with pytest.raises(UsageError, match="package gguf, which is not installed"):
            Transformers(small_model / "config.json", 10, depends_on_length=False)
        return
    assert main(["check", str(small_model), "--quick", "--against", "transformers"]) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert f"package {missing}, which is not installed" in lines[0]


def test_a_model_that_transformers_does_not_know_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(UsageError, match="cannot load"):
        Transformers(tmp_path, 10, depends_on_length=False)


def test_other_libraries_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model", "--against", "tea-leaves"]) == 2
    assert "transformers" in capsys.readouterr().err
