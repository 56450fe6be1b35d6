"""`kvern plan` as a user calls it: text, JSON, report, refusals, and how fast it answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvern.cli.main import main

CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
DOCUMENTED = {
    "engine", "engine_version", "per_rank", "tightest_rank", "pools", "block_size", "block_bytes",
    "num_blocks", "capacity_tokens", "max_concurrency", "max_model_len", "bytes_for_context",
    "fits", "explanation",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "qwen3-30b.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_json_has_every_documented_field(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = answer(capsys, config, "--kv-memory", "4.85GiB", "--context", "16384",
                 "--engine", "vllm@0.11")  # fmt: skip
    assert set(got) >= DOCUMENTED
    assert got["engine"] == "vllm"
    assert got["engine_version"] == "0.11"
    assert set(got["per_rank"][0]) >= {
        "rank", "weights_bytes", "reserve_bytes", "kv_budget_bytes", "num_blocks"
    }  # fmt: skip
    assert set(got["pools"][0]) >= {
        "name", "layers", "cells", "k_bytes", "v_bytes", "state_bytes", "bytes"
    }  # fmt: skip
    assert got["capacity_tokens"] == 52_960
    assert got["bytes_for_context"] == 16384 * 98_304
    assert got["explanation"]


def test_text_names_the_figures_and_the_formula(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, "--device", "h100-sxm", "--context", "16384", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "48 layers × 4 KV heads × (128 + 128) × 2 B (bf16)" in text
    assert "98,304 B per token" in text
    assert "30,532,122,624 parameters × 16 bit (bf16)" in text
    assert "79.647 GiB" in text
    assert "1.5 GiB" in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_need_is_answered(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = answer(capsys, config, "--need", "8x16384")
    assert got["fits"]
    assert got["options"][0]["max_concurrency"] >= 8
    assert main(["plan", config, "--need", "8x16384"]) == 0
    assert "Serves 8x16384, smallest first" in capsys.readouterr().out


def test_bounds_prefixes_and_lengths_have_their_own_keys(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,completion_tokens\n900,100\n100,40\n3000,200\n")
    got = answer(capsys, config, "--device", "h200", "--context", "8192", "--lengths", str(trace),
                 "--bound", "--batch", "16", "--shared-prefix", "1000")  # fmt: skip
    assert got["lengths"]["fits"]["0.5"] >= got["lengths"]["fits"]["0.99"] > 0
    assert got["lengths"]["utilisation"]["paging"] > 0.9
    assert got["bound"]["batch"] == 16
    assert got["bound"]["step_s"] > 0
    assert got["prefixes"]["shared_blocks"] == 62
    assert main(["plan", config, "--device", "h200", "--lengths", str(trace), "--bound"]) == 0
    text = capsys.readouterr().out
    assert "bounds, not promises" in text
    assert "seed 20260101" in text


def test_the_report_is_self_contained_and_has_plots(config: str, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    assert main(["plan", config, "--device", "h100-sxm", "--tp", "2", "--html", str(report)]) == 0
    html = report.read_text()
    assert html.count("<svg") == 2
    assert not re.search(r"(src|href)=|url\(|@import|<script", html)
    for name in ("bf16", "fp8", "int8", "int4"):
        assert f">{name}</text>" in html
    assert "rank 1" in html


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--device", "h100-smx"], 2, "nearest: h100-sxm"),
        (["--memory", "24GiB"], 1, "smallest change that fits"),
        (["--memory", "-3GiB"], 2, "-3GiB"),
        (["--kv-memory", "0"], 2, "must be positive"),
        (["--device", "h200", "--tp", "3"], 2, "does not divide"),
        (["--device", "h200", "--tp", "2", "--devices", "4"], 2, "do not agree"),
        (["--device", "h200", "--engine", "other"], 2, "unknown engine"),
        (["--kv-memory", "1GiB", "--bound"], 2, "--device NAME"),
        (["--kv-memory", "1GiB", "--extra-cache", "odd:layers=2"], 2, "unknown extra cache"),
        (["--kv-memory", "1GiB", "--context", "4096", "--shared-prefix", "4096"], 2, "nothing"),
    ],
)
def test_refusals_are_one_sentence(
    config: str,
    arguments: list[str],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", config, *arguments]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_gigabytes_are_told_apart(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = answer(capsys, config, "--memory", "80GB")
    assert "--memory 80GB is 74.506 GiB: GB is 10^9 bytes, GiB is 2^30" in got["warnings"]


def test_a_batch_is_held_against_what_fits(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (config, "--kv-memory", "4GiB", "--context", "16384", "--batch")
    [growth] = answer(capsys, *flags, "1")["warnings"]
    assert growth.startswith("a batch of 1 hides growth: each output token adds 96 KiB to every")
    assert answer(capsys, *flags, "2")["warnings"] == []
    [excess] = answer(capsys, *flags, "3")["warnings"]
    assert excess == "a batch of 3 requests of 16,384 tokens is more than the 2.66 that fit at once"


def test_a_model_and_devices_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert "MODEL is missing" in capsys.readouterr().err
    assert main(["plan", "--list-devices"]) == 0
    assert "b200" in capsys.readouterr().out


def test_weights_come_from_the_file(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = answer(capsys, str(smollm2_path), "--memory", "2GiB")
    weights = got["per_rank"][0]["weights_bytes"]
    assert 0.9 * smollm2_path.stat().st_size < weights < smollm2_path.stat().st_size
    assert got["block_bytes"] == 368_640
    assert "tensors of" in " ".join(got["explanation"])


def test_the_answer_needs_no_numpy(config: str) -> None:
    program = (
        "import sys; from kvern.cli.main import main; "
        f"code = main(['plan', {config!r}, '--device', 'h200', '--json']); "
        "heavy = {'numpy', 'torch', 'tokenizers', 'ml_dtypes'} & set(sys.modules); "
        "sys.exit(code or (f'imported {heavy}' if heavy else 0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
