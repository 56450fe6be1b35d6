"""A healthy engine passes, with equal bits where the backend promises them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvern import LLM
from kvern.check.doctor import check
from kvern.check.lab import CheckOptions
from kvern.check.report import report_lines
from kvern.cli.main import main

QUICK = CheckOptions(is_quick=True)


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_a_healthy_engine_passes(engine, block_size: int) -> None:
    report = check(engine(block_size=block_size), QUICK)
    assert report.is_healthy, report_lines(report)
    assert report.num_compared > 500
    assert all(case.num_compared > 0 for case in report.cases)


def test_every_case_is_there_and_bit_identical(engine, require_native: None) -> None:
    report = check(engine(backend="native"))
    names = [case.name for case in report.cases]
    chunks = [f"chunk-{size}" for size in (1, 2, 3, 7, 15, 16, 17, 64, "all")]
    sharing = [
        "full-hit",
        "partial-tail",
        "next-turn",
        "twins",
        "twin-aborted",
        "preempt",
        "replaced",
    ]
    others = ["fork", "beams", "salt", "neighbour-aborted"]
    expected = [
        "full-pass",
        "repeat",
        "decode",
        *chunks,
        "orders",
        "join-leave",
        "work",
        *sharing,
        *others,
    ]
    assert names == expected
    assert [case.name for case in report.cases if case.verdict != "pass"] == []
    assert report.tolerance == 0
    assert all(case.largest == 0 for case in report.cases if case.name != "full-pass")


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("kv_format", ["int8", "int8;0=bf16"])
def test_int8_passes_too(engine, kv_format: str, block_size: int) -> None:
    report = check(engine(kv_format=kv_format, block_size=block_size, kv_memory="4MiB"), QUICK)
    assert report.is_healthy, report_lines(report)
    if report.tolerance == 0:
        assert all(case.largest == 0 for case in report.cases if case.name != "full-pass")


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "int8"])
def test_the_reference_backend_stays_within_its_tolerance(engine, kv_format: str) -> None:
    report = check(engine(backend="reference", kv_format=kv_format), QUICK)
    assert report.is_healthy, report_lines(report)
    assert report.tolerance == {"fp32": 1e-4, "bf16": 3e-3, "int8": 3e-2}[kv_format]


def test_the_checked_engine_itself_stays_as_it_was(engine) -> None:
    llm = engine()
    before = llm.generate([[1, 2, 3]])[0].token_ids
    counters = llm.stats().counters.queries
    check(llm, QUICK, only=["decode"])
    assert llm.stats().counters.queries == counters
    assert llm.generate([[1, 2, 3]])[0].token_ids == before


def test_progress_counts_up_to_the_number_of_cases(engine) -> None:
    seen: list[tuple[int, int]] = []
    report = check(
        engine(),
        QUICK,
        only=["decode", "salt"],
        progress=lambda done, total, _: seen.append((done, total)),
    )
    assert seen == [(i, 4) for i in range(5)]
    assert len(report.cases) == 4


def test_the_document_has_every_figure(engine) -> None:
    document = check(engine(), QUICK, only=["decode"]).document()
    json.dumps(document, allow_nan=False)
    assert document["healthy"] is True
    (case,) = (case for case in document["cases"] if case["name"] == "decode")
    assert case["verdict"] == "pass"
    assert case["positions_compared"] == 36
    assert {"max_logit_difference", "max_kl_divergence", "position", "layer", "findings"} <= set(
        case
    )


def test_the_command_prints_a_table_and_exits_with_zero(
    small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(small_model), "--quick", "--context", "256"]) == 0
    out = capsys.readouterr().out
    assert "The answers with the cache are the answers without it." in out
    assert "preempt" in out


def test_the_command_exits_with_one_and_names_the_fault(
    small_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvern.check.faults.computing import restart_positions_at_decode

    original = LLM.__init__

    def tampered(self: LLM, *args, **kwargs) -> None:
        original(self, *args, **kwargs)
        if kwargs.get("share_weights_with") is not None:
            restart_positions_at_decode(self)

    monkeypatch.setattr(LLM, "__init__", tampered)
    assert main(["check", str(small_model), "--quick", "--context", "256", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["healthy"] is False
    assert document["faults"][0] == "positions"
