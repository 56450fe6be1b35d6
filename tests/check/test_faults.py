"""Every fault is found and named, whether the doctor sits around the broken part or inside it."""

from __future__ import annotations

import pytest

from kvern import LLM
from kvern.check.doctor import check
from kvern.check.faults import INJECTIONS
from kvern.check.lab import CheckOptions
from kvern.check.names import Fault

QUICK = CheckOptions(is_quick=True)


BY_CAUSE = [name for name, injection in INJECTIONS.items() if not injection.is_inside_kernels]


@pytest.mark.parametrize("name", INJECTIONS)
def test_an_injected_fault_is_named_by_its_effect(engine, name: str) -> None:
    """The doctor's wrappers lie around the fault: of a wrong batch it only sees the logits."""
    _expect_named(engine(), name, tampers_last=False)


@pytest.mark.parametrize("name", BY_CAUSE)
def test_an_injected_fault_is_named_by_its_cause(engine, name: str) -> None:
    """The fault lies around the doctor's wrappers, which see what the device is given."""
    _expect_named(engine(), name, tampers_last=True)


def _expect_named(llm: LLM, name: str, *, tampers_last: bool) -> None:
    injection = INJECTIONS[name]
    if injection.fault == Fault.ROUNDING and not llm.model.backend.row_invariant:
        pytest.skip("last bits are within the tolerance of this backend")
    report = check(llm, QUICK, tamper=injection.tamper, tampers_last=tampers_last)
    assert not report.is_healthy
    assert report.faults[0] == injection.fault, report.faults
    failed = [case for case in report.cases if case.verdict == "fail"]
    assert any(finding.fault == injection.fault for case in failed for finding in case.causes)


@pytest.mark.parametrize(
    "name", ["restart_positions_at_decode", "top_left_mask", "noise_in_batches"]
)
@pytest.mark.parametrize("kv_format", ["fp32", "bf16"])
def test_the_reference_backend_is_diagnosed_too(engine, name: str, kv_format: str) -> None:
    injection = INJECTIONS[name]
    llm = engine(backend="reference", kv_format=kv_format)
    report = check(llm, QUICK, tamper=injection.tamper, only=["decode", "chunk-7", "full-hit"])
    assert injection.fault == report.faults[0]


@pytest.mark.parametrize(
    "name", ["table_points_at_neighbour", "copy_tail_too_far", "write_into_sibling"]
)
@pytest.mark.parametrize("block_size", [4, 32])
def test_faults_are_named_at_other_block_sizes(engine, name: str, block_size: int) -> None:
    injection = INJECTIONS[name]
    report = check(engine(block_size=block_size), QUICK, tamper=injection.tamper)
    assert injection.fault == report.faults[0], report.faults


IN_INT8 = [name for name in INJECTIONS if name != "copy_tail_too_far"]
"""Narrow formats share whole blocks: there is no tail to copy."""

QUICKEST = [
    "top_left_mask",
    "table_points_at_neighbour",
    "write_into_sealed",
    "skip_last_token",
    "claim_unwritten",
    "write_into_sibling",
]


@pytest.mark.usefixtures("require_native")
@pytest.mark.parametrize("name", QUICKEST)
@pytest.mark.parametrize("tampers_last", [False, True])
def test_faults_are_named_in_int8(engine, name: str, tampers_last: bool) -> None:
    if tampers_last and name not in BY_CAUSE:
        pytest.skip("lies inside the kernels")
    _expect_named(engine(kv_format="int8"), name, tampers_last=tampers_last)


@pytest.mark.full
@pytest.mark.usefixtures("require_native")
@pytest.mark.parametrize("name", [name for name in IN_INT8 if name not in QUICKEST])
@pytest.mark.parametrize("tampers_last", [False, True])
def test_every_other_fault_is_named_in_int8(engine, name: str, tampers_last: bool) -> None:
    if tampers_last and name not in BY_CAUSE:
        pytest.skip("lies inside the kernels")
    _expect_named(engine(kv_format="int8"), name, tampers_last=tampers_last)


def test_every_fault_of_the_proof_has_an_injection() -> None:
    proven = {injection.fault for injection in INJECTIONS.values()}
    symptoms = {
        Fault.UNEXPLAINED,
        Fault.NO_HIT,
        Fault.INVARIANT,
        Fault.ACCOUNTING,
        Fault.FULL_PASS,
        Fault.DISAGREES,
    }
    assert proven == set(Fault) - symptoms


def test_traced_layers_name_the_first_one_that_differs(engine) -> None:
    tamper = INJECTIONS["top_left_mask"].tamper
    options = CheckOptions(is_quick=True, trace_layers=True)
    report = check(engine(), options, tamper=tamper, only=["chunk-7"])
    (failed,) = (case for case in report.cases if case.verdict == "fail")
    assert failed.layer == 0


def test_a_cache_that_finds_nothing_is_not_healthy(engine) -> None:
    """It passes every comparison, and would hide every fault of sharing."""

    def forget(llm) -> None:
        index = llm.model.scheduler.state.index
        index.tree.walk = lambda *_: index.tree.first_child[:0]
        index.tree.children = lambda *_: index.tree.first_child[:0]

    report = check(engine(), QUICK, tamper=forget, only=["full-hit"])
    assert report.faults == (Fault.NO_HIT,)


def test_wrong_counts_of_work_are_found(engine) -> None:
    def miscount(llm) -> None:
        runner = llm.model.runner
        execute = runner.execute

        def tampered(plan):
            runner.counters.tokens_processed += 1
            return execute(plan)

        runner.execute = tampered

    report = check(engine(), QUICK, tamper=miscount, only=["work"])
    assert report.faults == (Fault.ACCOUNTING,)
