"""`kvern inspect`: the fields, the table, and an answer in a moment without numpy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.spec.small import LLAMA

from kvern.cli.main import main
from kvern.spec.configs import load_model_spec

HYBRID = LLAMA | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "sliding_window": 64,
    "head_dim": 32,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(HYBRID))
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["inspect", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_fields(config: Path, capsys) -> None:
    document = run_json(capsys, str(config), "--context", "1000", "--batch", "3")
    assert document["model"] == "tiny"
    assert document["num_layers"] == 12 == len(document["layers"])
    assert document["layers"][0] == {
        "index": 0,
        "kind": "sliding_attention",
        "content": "heads",
        "reach": "window(64)",
        "num_kv_heads": 2,
        "key_dim": 32,
        "value_dim": 32,
        "bytes_per_token": 256,
        "fixed_bytes": 0,
    }
    assert document["layers"][5]["reach"] == "all"
    assert document["kv_bytes_per_token"] == 12 * 256
    assert document["kv_growing_bytes_per_token"] == 2 * 256
    assert document["kv_fixed_bytes"] == 0
    assert document["kv_bytes"] == 3 * 256 * (2 * 1000 + 10 * 64)


def test_context_defaults_to_the_models_limit(config: Path, capsys) -> None:
    document = run_json(capsys, str(config.parent))
    assert (document["context"], document["batch"]) == (2048, 1)


def test_formats_and_pages(config: Path, capsys) -> None:
    arguments = (str(config), "--kv-format", "kivi2;5=bf16", "--block-size", "32")
    document = run_json(capsys, *arguments)
    assert document["layers"][0]["bytes_per_token"] == 2 * 2 * 32 * 3 / 8
    assert document["layers"][5]["bytes_per_token"] == 256
    assert sum(len(group["layers"]) for group in document["groups"]) == 12
    assert {group["page_bytes"] for group in document["groups"]} == {document["page_bytes"]}
    assert document["kv_bytes_in_pages"] >= document["kv_bytes"]


def test_table_folds_equal_layers(config: Path, capsys) -> None:
    assert main(["inspect", str(config), "--context", "4096", "--block-size", "16"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "tiny: LlamaForCausalLM, 12 layers, up to 2,048 tokens"
    assert [line for line in lines if line.startswith("0-4, 6-10")]
    assert [line for line in lines if line.startswith("5, 11")]
    assert "3,072 B in bf16; 512 B once windows and chunks are full" in out
    assert "(the model's own limit is 2,048 tokens)" in out
    assert "pages of 8,192 B" in out


def test_layers_beside_the_decoder_and_parameters_in_words(tmp_path: Path, capsys) -> None:
    path = tmp_path / "config.json"

    def printed(**changes: object) -> str:
        path.write_text(json.dumps(LLAMA | changes))
        assert main(["inspect", str(tmp_path)]) == 0
        return capsys.readouterr().out

    plain = printed()
    assert "multi-token-prediction" not in plain
    assert f"parameters          {load_model_spec(LLAMA).parameters.total:,}\n" in plain
    assert "beside these: 2 multi-token-prediction layers (full_attention), 256 B" in printed(
        num_nextn_predict_layers=2
    )
    assert "not counted: the configuration does not state intermediate_size" in printed(
        intermediate_size=None
    )
    uncounted = printed(model_type="stablelm")
    assert "not counted: kvern does not know how the weights of stablelm are laid out" in uncounted
    document = run_json(capsys, str(tmp_path))
    assert document["num_parameters"] is None
    assert "stablelm" in document["num_parameters_missing"]


def test_default_model(smollm2_path: Path, capsys) -> None:
    document = run_json(capsys, "smollm2")
    assert document["model"] == "smollm2"
    assert document["kv_bytes_per_token"] == 23_040
    assert document["num_parameters"] == 134_515_008


def test_every_configuration_prints(shared_data: Path, capsys) -> None:
    for file in sorted((shared_data / "model_configs").glob("*.json")):
        assert main(["inspect", str(file)]) == 0
        assert capsys.readouterr().out.startswith(file.stem)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--context", "0"], 2, "--context is 0"),
        (["--batch", "-1"], 2, "--batch is -1"),
        (["--kv-format", "int9"], 2, "unknown KV format 'int9'"),
        (["--block-size", "0"], 2, "must be positive"),
        (["--kv-format", "kivi2", "--block-size", "16"], 2, "a multiple of 32"),
    ],
)
def test_wrong_usage(config: Path, capsys, arguments: list[str], code: int, message: str) -> None:
    assert main(["inspect", str(config), *arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_unknown_models_are_one_sentence(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "llamb"}))
    assert main(["inspect", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "'llamb'" in error
    assert error.count("\n") == 1


def test_answers_without_numpy(config: Path) -> None:
    program = (
        "import sys\n"
        "from kvern.cli.main import main\n"
        f"code = main(['inspect', {str(config)!r}])\n"
        "assert 'numpy' not in sys.modules, 'numpy was imported'\n"
        "sys.exit(code)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
