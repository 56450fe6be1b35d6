"""Cache descriptions from real configurations: exact figures, strict reading, named refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.spec.small import LLAMA, llama

from kvern.spec import (
    All,
    Chunk,
    Heads,
    Index,
    Latent,
    Window,
    bytes_for_context,
    make_kv_plan,
)
from kvern.spec.configs import FAMILIES, MissingFieldError, load_model_spec

GIB, MIB = 2**30, 2**20

# (file, bytes per token in bf16, fixed bytes per sequence): model cards, papers, engine logs
FIGURES = [
    ("meta-llama--Llama-3.1-8B-Instruct", 131_072, 0),
    ("meta-llama--Meta-Llama-3-70B", 327_680, 0),
    ("meta-llama--Llama-3.1-405B", 516_096, 0),
    ("meta-llama--Llama-2-7b-hf", 524_288, 0),
    ("mistralai--Mistral-7B-v0.1", 131_072, 0),
    ("tiiuae--falcon-7b", 8_192, 0),
    ("THUDM--chatglm2-6b-32k", 28_672, 0),
    ("openai-community--gpt2", 36_864, 0),
    ("facebook--opt-125m", 36_864, 0),
    ("microsoft--phi-4", 204_800, 0),
    ("allenai--OLMoE-1B-7B-0924", 131_072, 0),
    ("Qwen--Qwen3-235B-A22B-FP8", 94 * 2 * 4 * 128 * 2, 0),
    ("MiniMaxAI--MiniMax-M2.5", 62 * 2 * 8 * 128 * 2, 0),
    ("MiniMaxAI--MiniMax-M3", 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2, 0),
    ("XiaomiMiMo--MiMo-V2-Flash", (39 * 8 + 9 * 4) * (192 + 128) * 2, 0),
    ("google--gemma-3-270m", 18 * 2 * 256 * 2, 0),
    ("google--gemma-3n-E4B", 20 * 2 * 2 * 256 * 2, 0),
    ("google--gemma-4-E2B-it", 12 * 2 * 256 * 2 + 3 * 2 * 512 * 2, 0),
    ("google--gemma-4-E4B-it", 20 * 2 * 2 * 256 * 2 + 4 * 2 * 2 * 512 * 2, 0),
    ("google--gemma-4-12B-it", 40 * 2 * 8 * 256 * 2 + 8 * 2 * 512 * 2, 0),
    ("google--gemma-4-26B-A4B-it", 25 * 2 * 8 * 256 * 2 + 5 * 2 * 2 * 512 * 2, 0),
    ("google--gemma-4-31B-it", 50 * 2 * 16 * 256 * 2 + 10 * 2 * 4 * 512 * 2, 0),
    ("deepseek-ai--DeepSeek-V2", 34_560 * 2, 0),
    ("deepseek-ai--DeepSeek-V3", 70_272, 0),
    ("deepseek-ai--DeepSeek-R1-0528", 70_272, 0),
    ("moonshotai--Kimi-K2-Thinking", 70_272, 0),
    ("moonshotai--Kimi-K2.5", 70_272, 0),
    ("mistralai--Mistral-Small-4-119B-2603", 36 * 640, 0),
    ("openbmb--MiniCPM3-4B", 62 * (256 + 32) * 2, 0),
    ("deepseek-ai--DeepSeek-V3.2-Exp", 61 * (576 + 128) * 2, 0),
    ("zai-org--GLM-5", 78 * (576 + 128) * 2, 0),
    ("Qwen--Qwen3-Next-80B-A3B-Instruct", 24_576, 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)),
    ("Qwen--Qwen3.5-9B", 32_768, 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)),
    ("Qwen--Qwen3.8-27B", 65_536, 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)),
    ("Qwen--Qwen3.8-Flash-Next", 12 * (2048 + 256), 36 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)),
    ("moonshotai--Kimi-Linear-48B-A3B-Instruct", 7 * 1152, 20 * (32 * 128**2 * 4 + 3 * 12288 * 2)),
    ("inclusionAI--Ling-3.0-flash", 8_064, 35 * (32 * 128 * 128 * 4 + 3 * 12288 * 2)),
    ("openbmb--MiniCPM-SALA", 8_192, 24 * 32 * 128 * 128 * 4),
    ("ibm-granite--granite-4.0-h-micro", 8_192, 36 * (64 * 64 * 128 * 4 + 3 * 4352 * 2)),
    ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 6_144, 23 * (64 * 64 * 128 * 4 + 3 * 6144 * 2)),
    ("ai21labs--Jamba-v0.1", 16_384, 28 * (8192 * 16 * 4 + 3 * 8192 * 2)),
    ("LiquidAI--LFM2.5-1.2B-Instruct", 12_288, 10 * 2048 * 2 * 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "per_token", "fixed"), FIGURES, ids=[f[0] for f in FIGURES])
def test_bytes_of_real_models(load, name: str, per_token: int, fixed: int) -> None:
    model = load(name)
    assert model.kv_bytes_per_token == per_token
    assert model.kv_fixed_bytes == fixed


def test_every_configuration_is_described(shared_data: Path) -> None:
    files = sorted((shared_data / "model_configs").glob("*.json"))
    assert len(files) >= 80
    for file in files:
        model = load_model_spec(file)
        config = json.loads(file.read_text())
        config = config.get("text_config", config)
        assert model.num_layers == config["num_hidden_layers"]
        assert model.max_model_len == config["max_position_embeddings"]
        assert model.name == file.stem
        assert model.kv_bytes_per_token + model.kv_fixed_bytes > 0
        plan = make_kv_plan(model, "bf16", 16, num_blocks=2)
        assert {group.page_bytes for group in plan.groups} == {plan.page_bytes}


def test_windows_chunks_and_states_at_a_length(load) -> None:
    next_80b = load("Qwen--Qwen3-Next-80B-A3B-Instruct")
    assert bytes_for_context(next_80b, 32_768) - next_80b.kv_fixed_bytes == 0.75 * GIB
    assert round(next_80b.kv_fixed_bytes / MIB, 1) == 73.7
    gpt_oss = load("openai--gpt-oss-20b")
    assert bytes_for_context(gpt_oss, 32_768) == 12 * 2048 * (32_768 + 128)
    scout = load("meta-llama--Llama-4-Scout-17B-16E-Instruct")
    assert bytes_for_context(scout, 1_000_000) == 4096 * (12 * 1_000_000 + 36 * 8192)
    mistral = load("mistralai--Mistral-7B-v0.1")
    assert bytes_for_context(mistral, 32_768) == 131_072 * 4096
    assert load("microsoft--Phi-3-mini-4k-instruct").layers[0].caches[0].reach == Window(2047)


def test_gemma_3_27b_at_32k() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 62,
            "hidden_size": 5376,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "max_position_embeddings": 131_072,
        },
    }
    model = load_model_spec(config)
    assert sum(layer.kind == "full_attention" for layer in model.layers) == 10
    assert bytes_for_context(model, 32_768) == 2.90625 * GIB
    assert model.max_model_len == 131_072


def test_schedules_of_hybrids(load) -> None:
    def full_layers(name: str) -> list[int]:
        layers = load(name).layers
        return [layer.index for layer in layers if layer.kind == "full_attention"]

    assert full_layers("google--gemma-3-270m") == [5, 11, 17]
    assert full_layers("moonshotai--Kimi-Linear-48B-A3B-Instruct") == [3, 7, 11, 15, 19, 23, 26]
    assert full_layers("ai21labs--Jamba-v0.1") == [4, 12, 20, 28]
    assert full_layers("inclusionAI--Ling-3.0-flash") == [5, 11, 17, 23, 29, 35, 41]
    glm = load("zai-org--GLM-5.3-Flash")
    assert [x.index for x in glm.layers if x.kind == "indexed_attention"] == list(range(3, 45, 4))


def test_layers_that_share_a_cache(load) -> None:
    layers = load("google--gemma-4-E2B-it").layers
    sources = {layer.index: layer.caches[0].share_with for layer in layers if layer.index >= 15}
    assert set(sources.values()) == {13, 14}
    assert sources[19] == 14  # a full layer reads the last full layer that stores
    assert all(layer.caches[0].share_with is None for layer in layers[:15])
    full = layers[14].caches[0].content
    assert isinstance(full, Heads)
    assert (full.num_kv_heads, full.key_dim) == (1, 512)


def test_index_keys_lie_beside_what_they_select_from(load) -> None:
    sparse = load("deepseek-ai--DeepSeek-V3.2-Exp").layers[0].caches
    assert [cache.content for cache in sparse] == [Latent(512, 64), Index(128)]
    pooled = load("zai-org--GLM-5.3-Flash").layers[3].caches
    forms = [(cache.stride, cache.reach) for cache in pooled]
    assert forms == [(1, All()), (16, All()), (1, Chunk(16))]
    assert pooled[0].content == Latent(512, 0)


def test_compressed_attention_of_deepseek_v4(load) -> None:
    model = load("deepseek-ai--DeepSeek-V4-Flash")
    window, sparse, heavy = (model.layers[i].caches for i in (0, 2, 3))
    assert [(c.content, c.reach) for c in window] == [(Latent(448, 64), Window(128))]
    assert [c.stride for c in sparse] == [1, 4, 4, 1, 1]
    assert [c.content for c in sparse[1:3]] == [Latent(448, 64), Index(128)]
    assert [(c.stride, c.reach) for c in heavy[1:]] == [(128, All()), (1, Chunk(128))]
    assert model.kv_growing_bytes_per_token == 21 * (1024 + 256) / 4 + 20 * 1024 / 128
    narrow = model.with_kv_format("int8").layers[2].caches
    assert narrow[0].k_codec.dtype == "int8"
    assert narrow[3].k_codec.dtype == "fp32"  # the compressor's inputs keep their form


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "factor": 4.0}, 8192),
        ({"type": "linear", "factor": 2.0}, 4096),
        ({"rope_type": "dynamic", "factor": 2.5}, 5120),
        ({"type": "longrope", "short_factor": [1.0]}, 2048),
        ({"mrope_section": [16, 24, 24], "type": "mrope"}, 2048),
    ],
)
def test_context_limit_with_rope_scaling(scaling, expected: int) -> None:
    assert load_model_spec(llama(rope_scaling=scaling)).max_model_len == expected


def test_rope_parameters_per_layer_kind_are_understood() -> None:
    table = {"full_attention": {"rope_type": "yarn", "factor": 2.0}, "sliding_attention": {}}
    assert load_model_spec(llama(rope_parameters=table)).max_model_len == 4096


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (llama(model_type="qwen2", sliding_window=64), "FFFF"),
        (llama(model_type="qwen2", sliding_window=64, use_sliding_window=True,
               max_window_layers=3), "FFFS"),
        (llama(model_type="mistral", sliding_window=None), "FFFF"),
        (llama(model_type="mistral", sliding_window=64), "SSSS"),
        (llama(model_type="cohere2", sliding_window=64), "SSSF"),
        (llama(model_type="gemma3_text", sliding_window=64, sliding_window_pattern=2), "SFSF"),
        (llama(model_type="exaone4", sliding_window=64, sliding_window_pattern="LLG"), "SSFS"),
        (llama(model_type="llama4_text", attention_chunk_size=64), "CCCF"),
        (llama(model_type="llama4_text", attention_chunk_size=64, no_rope_layers=[1, 0, 1, 0]),
         "CFCF"),
        (llama(model_type="smollm3", sliding_window=64, use_sliding_window=True), "FFFS"),
        (llama(model_type="mimo_v2_flash", sliding_window=64, hybrid_layer_pattern=[0, 1, 1, 0]),
         "FSSF"),
        (llama(model_type="gpt_neo", num_layers=4, num_heads=4, window_size=64,
               attention_types=[[["global", "local"], 2]]), "FSFS"),
        (llama(layer_types=["attention", "local", "global", "sliding_attention"],
               sliding_window=64), "FSFS"),
    ],
)  # fmt: skip
def test_window_spellings(config, kinds: str) -> None:
    letters = {"F": "full_attention", "S": "sliding_attention", "C": "chunked_attention"}
    model = load_model_spec(config)
    assert [layer.kind for layer in model.layers] == [letters[letter] for letter in kinds]
    reaches = {"F": All(), "S": Window(64), "C": Chunk(64)}
    assert [layer.caches[0].reach for layer in model.layers] == [reaches[x] for x in kinds]


def test_sliding_window_size_does_not_count_the_query() -> None:
    config = llama(model_type="mimo_v2_flash", sliding_window=128, sliding_window_size=128)
    assert load_model_spec(config).layers[1].caches[0].reach == Window(129)


@pytest.mark.parametrize("wrapper", ["text_config", "llm_config", "language_config"])
def test_text_models_inside_others(wrapper: str) -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "architectures"}
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "torch_dtype": "float16",
        wrapper: inner,
    }
    model = load_model_spec(config, "picture-model")
    assert (model.family, model.architecture) == ("llama", "LlavaForConditionalGeneration")
    assert model.torch_dtype == "float16"
    assert model.kv_bytes_per_token == load_model_spec(LLAMA).kv_bytes_per_token


def test_nested_configurations_leave_out_their_class_defaults() -> None:
    """As published: LLaVA-1.5's and Gemma 3 4B's text configurations state only differences."""
    vicuna = {"model_type": "llama", "vocab_size": 32_064, "max_position_embeddings": 4096}
    model = load_model_spec({"model_type": "llava", "text_config": vicuna})
    assert model.kv_bytes_per_token == 524_288
    assert model.parameters is not None
    assert model.parameters.total == 6_738_415_616 + 2 * 64 * 4096
    gemma = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    model = load_model_spec({"model_type": "gemma3", "text_config": gemma})
    assert model.layers[0].caches[0].content == Heads(4, 256, 256)
    assert model.parameters is not None
    assert model.parameters.total == 3_880_263_168
    with pytest.raises(MissingFieldError, match="num_hidden_layers"):
        load_model_spec(vicuna)


def test_nemotron_pattern_and_minimax_list() -> None:
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 6, "conv_kernel": 4}
    model = load_model_spec(llama(model_type="nemotron_h", hybrid_override_pattern="M-*E", **mamba))
    kinds = [layer.kind for layer in model.layers]
    assert kinds == ["linear_attention", "mlp", "full_attention", "moe"]
    assert [len(layer.caches) for layer in model.layers] == [1, 0, 1, 0]
    model = load_model_spec(llama(model_type="minimax", attn_type_list=[0, 1, 0, 1]))
    assert model.kv_fixed_bytes == 2 * 4 * 16 * 16 * 4


def test_shared_indexers_keep_no_keys() -> None:
    latent = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "index_head_dim": 8}
    model = load_model_spec(llama(model_type="glm_moe_dsa", index_topk_pattern="FSFS", **latent))
    assert [len(layer.caches) for layer in model.layers] == [2, 1, 2, 1]


def test_families_are_named_once() -> None:
    assert len(FAMILIES) > 90
    assert all(name == family.name for name, family in FAMILIES.items())
