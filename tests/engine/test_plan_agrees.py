"""`kvern plan --engine kvern` and a running engine give the same pool: blocks and bytes, tolerance zero."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import write_tiny_model

from kvern import LLM
from kvern.cli.main import main

CASES = [
    {"kv_format": "bf16", "kv_memory": "64MiB", "block_size": 16},
    {"kv_format": "fp16", "kv_memory": "33MB", "block_size": 1},
    {"kv_format": "fp32", "kv_memory": "10MiB", "block_size": 4},
    {"kv_format": "bf16", "kv_memory": "7654321", "block_size": 32},
]


def planned(
    capsys: pytest.CaptureFixture[str], model: Path, options: dict[str, Any]
) -> dict[str, Any]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main(["plan", str(model), "--engine", "kvern", "--context=100", *flags, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def assert_agrees(capsys: pytest.CaptureFixture[str], model: Path, options: dict[str, Any]) -> None:
    plan = planned(capsys, model, options)
    with LLM(model, backend="reference", **options) as llm:
        assert plan["num_blocks"] == llm.model.kv_plan.num_blocks == len(llm.model.store.pages)
        assert plan["pool_bytes"] == llm.model.store.nbytes
        assert plan["block_bytes"] == llm.model.kv_plan.page_bytes
        usable = plan["num_blocks"] - 1
        assert plan["capacity_tokens"] == usable * options["block_size"]
        assert llm.stats().free_blocks == usable


@pytest.mark.parametrize("options", CASES, ids=lambda o: f"{o['kv_format']}-{o['block_size']}")
def test_small_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    for index, changes in enumerate(
        ({}, {"num_key_value_heads": 1, "num_hidden_layers": 3}, {"head_dim": 24})
    ):
        model = write_tiny_model(tmp_path / str(index), **changes)
        assert_agrees(capsys, model, options)


@pytest.mark.parametrize("options", CASES, ids=lambda o: f"{o['kv_format']}-{o['block_size']}")
def test_the_default_model(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    assert_agrees(capsys, smollm2_path, options)


@pytest.mark.full
def test_a_hybrid_model_has_uniform_pages_in_both(
    gemma3_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"kv_format": "bf16", "kv_memory": "64MiB", "block_size": 16}
    plan = planned(capsys, gemma3_path, options)
    with LLM(gemma3_path, backend="reference", **options) as llm:
        assert plan["num_blocks"] == llm.model.kv_plan.num_blocks
        assert plan["pool_bytes"] == llm.model.store.nbytes
        assert len(plan["groups"]) == len(llm.model.kv_plan.groups)
