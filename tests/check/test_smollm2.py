"""The doctor on the default model, as the README shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvern.check.compare import NO_DIFFERENCE
from kvern.cli.main import main

pytestmark = pytest.mark.full


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code = main(["check", *arguments, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0, document["faults"]
    return document


def test_default_settings_are_bit_identical(
    require_native: None, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = run(capsys, "smollm2", "--backend", "native")
    assert document["tolerance"] == 0
    assert document["positions_compared"] > 4000
    for case in document["cases"]:
        assert case["verdict"] == "pass"
        if case["name"] != "full-pass":
            assert case["max_logit_difference"] == NO_DIFFERENCE.largest


def test_float32_on_the_reference_backend_stays_within_its_tolerance(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    formats = ("--kv-format", "fp32", "--weights-format", "fp32")
    document = run(capsys, "smollm2", "--backend", "reference", *formats)
    assert document["tolerance"] == 1e-4
    assert max(case["max_relative_difference"] for case in document["cases"]) < 1e-4


def test_gemma3_with_its_windows_is_bit_identical(
    require_native: None, gemma3_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = run(capsys, "gemma3-270m", "--backend", "native", "--quick")
    assert document["tolerance"] == 0
