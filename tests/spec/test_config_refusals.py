"""Strict reading: what a configuration lacks or cannot mean is named, files that are none are refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.spec.small import LLAMA, llama

from kvern.errors import FileFormatError, KvernError, ModelError, UnsupportedModelError
from kvern.spec.configs import FAMILIES, MissingFieldError, load_model_spec


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (llama(model_type="llamb"), UnsupportedModelError, "'llamb'.*families whose.*llama"),
        ({"num_hidden_layers": 4}, UnsupportedModelError, "no model_type"),
        (llama(layer_types=["full_attention"] * 3 + ["rwkv"]), UnsupportedModelError,
         "layer 3 has the unknown kind 'rwkv'.*kinds are chunked_attention, full_attention"),
        (llama(layer_types=["full_attention"] * 3), ModelError, "3 entries for 4 layers"),
        (llama(model_type="nemotron_h", hybrid_override_pattern="MX*-", mamba_num_heads=8),
         UnsupportedModelError, "layer 1 has the unknown kind 'X'"),
        (llama(model_type="bert"), UnsupportedModelError, "encoder: every token attends in both"),
        (llama(model_type="t5"), UnsupportedModelError, "encoder-decoder"),
        (llama(is_encoder_decoder=True), UnsupportedModelError, "encoder-decoder"),
        (llama(model_type="paligemma"), UnsupportedModelError, "prefix in both directions"),
        (llama(prefix_lm=True), UnsupportedModelError, "prefix in both directions"),
        (llama(model_type="mpt", attn_config={"prefix_lm": True}), UnsupportedModelError,
         "prefix in both directions"),
        (llama(model_type="Dream"), UnsupportedModelError, "fills in tokens in any order"),
        (llama(model_type="megatron-bert"), UnsupportedModelError, "is an encoder"),
        (llama(model_type="xlm-roberta-xl"), UnsupportedModelError, "is an encoder"),
        (llama(is_causal=False), UnsupportedModelError, "new token changes old positions"),
        (llama(model_type="gemma3_text", sliding_window=8, use_bidirectional_attention=True),
         UnsupportedModelError, "nothing can be cached"),
        (llama(model_type="chatglm", position_encoding_2d=True), ModelError, "both directions"),
        ({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}, MissingFieldError,
         "config: the configuration lacks num_attention_heads"),
        ({"model_type": "llama"}, MissingFieldError, "lacks num_hidden_layers"),
        (llama(num_key_value_heads=0), ModelError, "num_key_value_heads is 0"),
        (llama(num_hidden_layers=True), ModelError, "num_hidden_layers is True"),
        (llama(num_hidden_layers=10**6), ModelError, "absurd"),
        (llama(hidden_size=65), ModelError, "hidden_size 65 is no multiple"),
        (llama(head_dim="64"), ModelError, "head_dim is '64'"),
        (llama(model_type="mistral", sliding_window=-1), ModelError, "sliding_window is -1"),
        (llama(layer_types=["sliding_attention"] * 4), MissingFieldError, "lacks sliding_window"),
        (llama(model_type="gemma3n_text", sliding_window=8, num_kv_shared_layers=4), ModelError,
         "none stores"),
        (llama(rope_scaling=None, tie_word_embeddings="yes"), ModelError, "true or false"),
        (llama(model_type="glm_moe_dsa", kv_lora_rank=8, qk_rope_head_dim=4, index_head_dim=8,
               index_topk_pattern="FFQS"), ModelError, "indexer modes"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(config, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_model_spec(config)


def test_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-1.5B"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load_model_spec(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_model_spec(folder).name == "Tiny-1.5B"
    assert load_model_spec(str(folder / "config.json")).name == "Tiny-1.5B"
    assert load_model_spec(folder, "mine").name == "mine"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(FileFormatError, match=str(file)):
        load_model_spec(file)


FIELDS = sorted(
    {
        *LLAMA,
        *[
            "attention_types",
            "attn_config",
            "attn_layer_offset",
            "attn_layer_period",
            "attn_type_list",
        ],
        *[
            "compress_ratios",
            "compress_rates",
            "conv_L_cache",
            "dtype",
            "expert_layer_period",
            "ffn_dim",
        ],
        *["first_k_dense_replace", "full_attention_interval", "full_attn_idxs", "head_dim"],
        *["hybrid_layer_pattern", "hybrid_override_pattern", "index_head_dim", "index_kpool"],
        *[
            "index_topk_pattern",
            "indexer_types",
            "kv_lora_rank",
            "layer_types",
            "layers_block_type",
        ],
        *["linear_attn_config", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_n_heads"],
        *["max_window_layers", "mixer_types", "mlp_layer_types", "mlp_only_layers", "moe_layers"],
        *[
            "multi_query",
            "n_head",
            "n_layer",
            "no_rope_layers",
            "num_experts",
            "num_kv_shared_layers",
        ],
        *[
            "partial_rotary_factor",
            "q_lora_rank",
            "qk_rope_head_dim",
            "rope_parameters",
            "rope_scaling",
        ],
        *["sliding_window", "sliding_window_pattern", "text_config", "tie_word_embeddings"],
        *["torch_dtype", "use_sliding_window", "v_head_dim", "_params", "_mamba_layers"],
    }
)
ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10),
    st.floats(),
    st.text("FSLG*M-x", max_size=5),
    st.lists(st.one_of(st.integers(-1, 4), st.text("FS", max_size=2)), max_size=5),
    st.dictionaries(st.sampled_from(["factor", "rope_type", "num_heads", "full_attn_layers"]),
                    st.one_of(st.none(), st.integers(-1, 9), st.text(max_size=3)), max_size=3),
)  # fmt: skip


COMPLETE = LLAMA | dict.fromkeys(
    [
        "sliding_window",
        "attention_chunk_size",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "v_head_dim",
        "qk_nope_head_dim",
        "index_head_dim",
        "indexer_head_dim",
        "linear_num_key_heads",
        "linear_num_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_head_dim",
        "linear_conv_kernel_dim",
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_d_conv",
        "conv_L_cache",
        "attn_layer_period",
        "num_experts",
        "moe_intermediate_size",
        "num_experts_per_tok",
    ],
    4,
)


@settings(max_examples=2000)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(FIELDS), ODD_VALUES, min_size=1, max_size=3),
)
def test_odd_configurations_are_described_or_refused(family: str, changes: dict[str, Any]) -> None:
    """Whatever a field holds: a description, or one sentence; never another exception."""
    with contextlib.suppress(KvernError):
        model = load_model_spec(
            COMPLETE | {"attn_layer_offset": 1} | changes | {"model_type": family}
        )
        assert model.num_layers == len(model.layers)
        assert model.kv_bytes_per_token >= 0
