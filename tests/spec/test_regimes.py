"""Which lengths turn alike, as the specification reads it and as `inspect` says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvern.cli.main import main
from kvern.models.families import family_of
from kvern.spec.configs import load_model_spec
from kvern.spec.regimes import PositionRegimes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
CONFIGS: list[tuple[dict[str, Any], PositionRegimes | None, int]] = [
    ({}, None, 4096),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, PositionRegimes(4096, 1), 16384),
    ({"rope_scaling": {"type": "dynamic", "factor": 1.0}}, None, 4096),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
     PositionRegimes(4096, 1), 8192),
    ({"rope_scaling": LONG, "original_max_position_embeddings": 256}, PositionRegimes(256), 4096),
    ({"rope_scaling": {**LONG, "original_max_position_embeddings": 512}}, PositionRegimes(512), 4096),
    ({"rope_scaling": {**LONG, "type": "su", "rope_type": "su"},
      "original_max_position_embeddings": 256}, PositionRegimes(256), 4096),
    ({"rope_scaling": LONG, "original_max_position_embeddings": 4096}, None, 4096),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "regimes", "context"), CONFIGS)
def test_specification_and_decoder_read_the_same(
    fields: dict[str, Any], regimes: PositionRegimes | None, context: int
) -> None:
    config = {**LLAMA, **fields}
    spec, decoder = load_model_spec(config), family_of(config).describe(config)
    assert spec.regimes == decoder.regimes == regimes
    assert spec.max_model_len == decoder.max_positions == context


@pytest.mark.parametrize(
    ("fields", "words", "document"),
    [
        (CONFIGS[1][0], "past 4,096 tokens each token computes its whole sequence again",
         {"border": 4096, "step": 1}),
        (CONFIGS[4][0], "grows past 256 tokens is computed again there, once",
         {"border": 256, "step": None}),
        ({}, None, None),
    ],
)  # fmt: skip
def test_inspect_says_what_it_costs(
    fields: dict[str, Any],
    words: str | None,
    document: dict[str, Any] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **fields}))
    assert main(["inspect", str(path)]) == 0
    told = capsys.readouterr().out
    assert (words or "") in told
    assert ("computed again" in told or "computes its whole" in told) == (words is not None)
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["position_regimes"] == document


@pytest.mark.parametrize(("context", "warns"), [(4096, False), (8192, True)])
def test_plan_warns_where_every_token_is_a_pass(
    context: int, warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **CONFIGS[1][0]}))
    flags = ["--kv-memory", "1GiB", "--context", str(context)]
    assert main(["plan", str(path), "--engine", "kvern", *flags]) == 0
    assert ("--context 4096 stays below" in capsys.readouterr().out) == warns
