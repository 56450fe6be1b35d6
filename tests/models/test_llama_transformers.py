"""Random-weight Llama models, saved by transformers and run by kvern: float32 logits agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.harness import (
    Case,
    alone,
    assert_agrees,
    check_exactness,
    decoder_of,
    run,
    save_model,
    their_logits,
)

from kvern.kernels.reference import ReferenceBackend

FIELDS: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha-untied": {"num_key_value_heads": 6, "tie_word_embeddings": False},
    "mqa": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear-rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3-rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn-rope": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "dynamic-rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "head-dim": {"head_dim": 24},
}


def case_of(variant: str) -> Case:
    return Case("llama", "LlamaForCausalLM", {**FIELDS, **VARIANTS[variant]})


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits_agree_in_one_pass_in_chunks_and_token_by_token(
    tmp_path: Path, variant: str
) -> None:
    model = save_model(tmp_path, case_of(variant))
    decoder = decoder_of(tmp_path, ReferenceBackend())
    check_exactness(decoder, lambda ids: their_logits(model, ids))
    ids = np.random.default_rng(5).integers(0, 199, 90).astype(np.int32)
    theirs = their_logits(model, ids)
    for chunks in ([90], [7, 1, 30, 2, 50]):
        assert_agrees(run(decoder, [ids], alone(*chunks))[0], theirs)


def test_a_bf16_file_is_read_as_it_is(tmp_path: Path) -> None:
    model = save_model(tmp_path, case_of("gqa"), dtype="bfloat16")
    check_exactness(decoder_of(tmp_path, ReferenceBackend()), lambda ids: their_logits(model, ids))


def test_a_sharded_folder_loads_like_a_single_file(tmp_path: Path) -> None:
    model = save_model(tmp_path, case_of("gqa"))
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    ids = np.arange(20, dtype=np.int32)
    decoder = decoder_of(tmp_path / "sharded", ReferenceBackend())
    assert_agrees(run(decoder, [ids], alone(20))[0], their_logits(model, ids))
