"""Families read from GGUF files give the logits that transformers gives for the original weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.case_fields import YARN, small
from tests.models.cases import CASES
from tests.models.gguf_files import (
    GGUFCase,
    neighbouring_pairs,
    save_gguf,
    sorted_rows,
    turned,
    whole_norms,
)
from tests.models.harness import (
    Case,
    alone,
    assert_agrees,
    backend_of,
    random_ids,
    run,
    save_model,
    their_logits,
)

from kvern.models.decoder import Decoder
from kvern.models.families import FAMILIES, family_of
from kvern.models.weights import open_weights
from kvern.spec.configs import read_config
from kvern.spec.gguf import read_header

LLAMA = Case("llama", "LlamaForCausalLM", small(attention_bias=False))
GGUF_CASES: dict[str, GGUFCase] = {
    "llama": GGUFCase("llama", neighbouring_pairs),
    "qwen2": GGUFCase("qwen2"),
    "qwen3": GGUFCase("qwen3"),
    "qwen3-moe": GGUFCase(
        "qwen3moe",
        keys=(("expert_count", 6), ("expert_used_count", 2), ("expert_feed_forward_length", 40)),
        fields=(("norm_topk_prob", True),),
    ),
    "gemma": GGUFCase("gemma", whole_norms),
    "gemma2": GGUFCase(
        "gemma2",
        whole_norms,
        keys=(("attn_logit_softcapping", 5.0),),
        fields=(("query_pre_attn_scalar", 32),),
    ),
    "mixtral": GGUFCase(
        "llama", neighbouring_pairs, keys=(("expert_count", 4), ("expert_used_count", 2))
    ),
    "olmoe": GGUFCase("olmoe", keys=(("expert_count", 6), ("expert_used_count", 2))),
    "qwen2-moe": GGUFCase(
        "qwen2moe",
        keys=(
            ("expert_count", 6),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", 40),
            ("expert_shared_feed_forward_length", 56),
        ),
        fields=(("mlp_only_layers", []),),
    ),
    "starcoder2": GGUFCase("starcoder2"),
    "command-r": GGUFCase("command-r", keys=(("logit_scale", 0.0625),)),
    "falcon-7b": GGUFCase("falcon"),
    "gemma3": GGUFCase("gemma3", whole_norms, fields=(("query_pre_attn_scalar", 32),)),
    "deepseek-v2-lite": GGUFCase(
        "deepseek2",
        keys=(
            ("attention.kv_lora_rank", 32),
            ("rope.dimension_count", 8),
            ("attention.key_length", 24),
            ("attention.value_length", 12),
            ("leading_dense_block_count", 1),
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_shared_count", 2),
            ("rope.scaling.type", "yarn"),
            ("rope.scaling.factor", 8.0),
            ("rope.scaling.original_context_length", 16),
            ("rope.scaling.yarn_log_multiplier", 0.07),
            ("expert_feed_forward_length", 40),
        ),
        fields=(
            ("head_dim", None),
            ("rope_scaling", {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}),
        ),
    ),
    "phi3": GGUFCase("phi3"),
    "olmo2": GGUFCase("olmo2"),
    "smollm3": GGUFCase("smollm3", neighbouring_pairs),
    "granite": GGUFCase(
        "granite",
        neighbouring_pairs,
        keys=(
            ("embedding_scale", 3.0),
            ("attention.scale", 0.2),
            ("residual_scale", 0.3),
            ("logit_scale", 4.0),
        ),
    ),
    "gpt2": GGUFCase("gpt2", turned),
    "pythia": GGUFCase("gptneox", sorted_rows, keys=(("rope.dimension_count", 4),)),
}


@pytest.mark.parametrize("name", sorted(GGUF_CASES))
def test_a_gguf_file_gives_the_logits_of_its_source(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    case = next(case for case in (LLAMA, *CASES) if case.family == name)
    model = save_model(tmp_path, case, {**case.fields, **dict(GGUF_CASES[name].fields)})
    path = tmp_path / "model.gguf"
    save_gguf(path, model, GGUF_CASES[name])
    header = read_header(path)
    config = read_config(header)
    family = family_of(config, header.architecture)
    backend = backend_of("reference", request)
    decoder = Decoder(family.describe(config), family, open_weights(path, header), backend, "fp32")
    ids = random_ids(decoder, 30)
    for schedule in (alone(30), alone(*[1] * 30)):
        assert_agrees(run(decoder, [ids], schedule)[0], their_logits(model, ids))


def test_every_gguf_architecture_is_one_that_ggufs_own_table_has() -> None:
    gguf = pytest.importorskip("gguf")
    known = set(gguf.MODEL_ARCH_NAMES.values())
    for family in FAMILIES:
        assert set(family.gguf_architectures) <= known
        assert bool(family.gguf_architectures) <= (family.gguf_names is not None)
