"""Formats that can be planned and not yet run are named as such, for our own engine only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvern.cli.main import main

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


@pytest.mark.parametrize(
    ("engine", "kv_format", "is_noted"),
    [
        ("kvern", "int8", False),
        ("kvern", "kivi2", True),
        ("kvern", "bf16", False),
        ("vllm", "fp8", False),
    ],
)
def test_a_format_that_cannot_be_stored_yet_is_a_warning(
    model: str, capsys: pytest.CaptureFixture[str], engine: str, kv_format: str, is_noted: bool
) -> None:
    flags = ["--memory", "24GiB", "--context", "4096", "--kv-format", kv_format, "--engine", engine]
    assert main(["plan", model, *flags]) == 0
    assert ("not yet run" in capsys.readouterr().out) is is_noted


def test_the_need_names_it_too(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--engine", "kvern", "--need", "64x32768"]) == 0
    out = capsys.readouterr().out
    narrow = [line for line in out.splitlines() if " fp8 " in line or " int" in line]
    assert bool(narrow) == ("not yet run" in out)
