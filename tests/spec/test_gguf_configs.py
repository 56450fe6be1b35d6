"""GGUF metadata read as a configuration: the real files, and headers of every special family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.spec.gguf_bytes import ARRAY, BOOL, F32, GGUF, STRING, U32, Tensor

from kvern.errors import ModelError, UnsupportedModelError
from kvern.spec import All, Chunk, Heads, Latent, ModelSpec, Window
from kvern.spec.configs import load_model_spec, read_config
from kvern.spec.gguf import read_header


def header_of(arch: str, tensors: list[str] | None = None, **values: Any) -> GGUF:
    """A header whose keys are `values`, underscores before a dot-part written as `__`."""
    metadata: list[tuple[str, int, object]] = [("general.architecture", STRING, arch)]
    defaults = {
        "block_count": 4,
        "context_length": 2048,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
        "vocab_size": 128,
    }
    for name, value in (defaults | values).items():
        key = f"{arch}.{name.replace('__', '.')}"
        if isinstance(value, bool):
            metadata.append((key, BOOL, value))
        elif isinstance(value, float):
            metadata.append((key, F32, value))
        elif isinstance(value, str):
            metadata.append((key, STRING, value))
        elif isinstance(value, list):
            kind = BOOL if isinstance(value[0], bool) else U32
            metadata.append((key, ARRAY, (kind, value)))
        elif value is not None:
            metadata.append((key, U32, value))
    names = tensors or []
    return GGUF(
        metadata=metadata,
        tensors=[Tensor(name, (8,), 0, 32 * i) for i, name in enumerate(names)],
        data=b"\0" * 32 * len(names),
    )


@pytest.fixture
def load(tmp_path: Path):
    def load_header(content: GGUF) -> ModelSpec:
        path = tmp_path / "model.gguf"
        path.write_bytes(content.to_bytes())
        return load_model_spec(path)

    return load_header


def kinds(model: ModelSpec) -> list[str]:
    return [layer.kind.split("_")[0] for layer in model.layers]


def test_smollm2_file(smollm2_path: Path) -> None:
    header = read_header(smollm2_path)
    model = load_model_spec(header)
    assert model.kv_bytes_per_token == 23_040
    assert model.max_model_len == 8192
    assert model.parameters is not None
    assert model.parameters.total == header.num_parameters == 134_515_008
    assert model.tie_word_embeddings
    config = read_config(header)
    assert (config["rope_theta"], config["rotary_dim"]) == (100_000.0, 64)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


@pytest.mark.full
def test_gemma3_270m_file(gemma3_path: Path) -> None:
    header = read_header(gemma3_path)
    model = load_model_spec(header)
    assert model.parameters is not None
    assert model.parameters.total == header.num_parameters == 268_098_176
    reaches = [layer.caches[0].reach for layer in model.layers]
    assert reaches == ([Window(512)] * 5 + [All()]) * 3


def test_llama_with_experts_is_mixtral(load) -> None:
    model = load(header_of("llama", expert_count=4, expert_used_count=2))
    assert model.family == "mixtral"
    assert model.experts is not None
    assert model.experts.num_experts_per_token == 2


def test_output_tensor_unties_the_embedding(load) -> None:
    assert load(header_of("llama")).tie_word_embeddings
    assert not load(header_of("llama", ["output.weight"])).tie_word_embeddings


def test_yarn_states_its_original_length(load) -> None:
    scaling = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    model = load(header_of("qwen2", context_length=8192, **scaling))
    assert model.max_model_len == 8192
    model = load(header_of("qwen2", rope__scaling__original_context_length=1024, **scaling))
    assert model.max_model_len == 4096


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (header_of("gemma2", attention__sliding_window=8), ["sliding", "full"] * 2),
        (header_of("gemma3", block_count=6, attention__sliding_window=8),
         ["sliding"] * 5 + ["full"]),
        (header_of("gemma3", attention__sliding_window=8, attention__sliding_window_pattern=2),
         ["sliding", "full"] * 2),
        (header_of("gpt-oss", attention__sliding_window=8), ["sliding", "full"] * 2),
        (header_of("phi3", attention__sliding_window=8), ["sliding"] * 4),
        (header_of("phi3", attention__sliding_window=0), ["full"] * 4),
        (header_of("llama4", attention__chunk_size=8), ["chunked"] * 3 + ["full"]),
        (header_of("gemma3n", attention__sliding_window=8,
                   attention__sliding_window_pattern=[True, False, True, False],
                   attention__shared_kv_layers=2), ["sliding", "full"] * 2),
    ],
)  # fmt: skip
def test_windows_and_chunks(load, content: GGUF, expected: list[str]) -> None:
    model = load(content)
    assert kinds(model) == expected
    reaches = {"full": All(), "sliding": Window(8), "chunked": Chunk(8)}
    assert [layer.caches[0].reach for layer in model.layers] == [reaches[kind] for kind in expected]


def test_shared_layers(load) -> None:
    model = load(
        header_of(
            "gemma3n",
            attention__sliding_window=8,
            attention__sliding_window_pattern=[True, False, True, False],
            attention__shared_kv_layers=2,
        )
    )
    assert [layer.caches[0].share_with for layer in model.layers] == [None, None, 0, 1]


def test_gemma4_has_other_heads_in_full_layers(load) -> None:
    model = load(
        header_of(
            "gemma4",
            attention__sliding_window=8,
            attention__sliding_window_pattern=[True, True, True, False],
            attention__key_length=32,
            attention__key_length_swa=16,
            attention__head_count_kv=[2, 2, 2, 1],
        )
    )
    contents = [layer.caches[0].content for layer in model.layers]
    assert contents == [Heads(2, 16, 16)] * 3 + [Heads(1, 32, 32)]


@pytest.mark.parametrize("suffix", ["", "_mla"])
def test_latent_attention(load, suffix: str) -> None:
    key, value = f"attention__key_length{suffix}", f"attention__value_length{suffix}"
    content = header_of(
        "deepseek2",
        ["blk.3.exp_probs_b.bias"],
        attention__kv_lora_rank=24,
        rope__dimension_count=8,
        **{key: 24, value: 16},
    )
    model = load(content)
    assert model.family == "deepseek_v3"
    assert model.layers[0].caches[0].content == Latent(24, 8)
    assert model.details["qk_nope_head_dim"] == 16
    assert load(header_of("deepseek2", attention__kv_lora_rank=24, rope__dimension_count=8,
                          attention__key_length=24)).family == "deepseek_v2"  # fmt: skip


def test_gated_delta_net(load) -> None:
    model = load(
        header_of(
            "qwen3next",
            attention__key_length=16,
            full_attention_interval=4,
            ssm__conv_kernel=4,
            ssm__state_size=8,
            ssm__group_count=2,
            ssm__time_step_rank=4,
            ssm__inner_size=48,
        )
    )
    assert kinds(model) == ["linear"] * 3 + ["full"]
    conv, recurrent = model.layers[0].caches[0].content.parts
    assert (conv.shape, recurrent.shape) == ((2 * 2 * 8 + 48, 3), (4, 8, 12))


def test_mamba_layers_have_no_kv_heads(load) -> None:
    ssm = {"ssm__conv_kernel": 4, "ssm__state_size": 6, "ssm__inner_size": 128}
    granite = load(
        header_of(
            "granitehybrid",
            attention__head_count_kv=[0, 0, 2, 0],
            ssm__time_step_rank=8,
            ssm__group_count=2,
            **ssm,
        )
    )
    assert kinds(granite) == ["linear", "linear", "full", "linear"]
    conv, recurrent = granite.layers[0].caches[0].content.parts
    assert (conv.shape, recurrent.shape) == ((128 + 2 * 2 * 6, 3), (8, 16, 6))
    jamba = load(header_of("jamba", attention__head_count_kv=[0, 2, 0, 2], **ssm))
    assert kinds(jamba) == ["linear", "full"] * 2
    assert jamba.layers[0].caches[0].content.parts[1].shape == (128, 6)
    nemotron = load(
        header_of(
            "nemotron_h",
            attention__head_count_kv=[0, 0, 2, 0],
            feed_forward_length=[0, 96, 0, 0],
            ssm__time_step_rank=8,
            ssm__group_count=2,
            **ssm,
        )
    )
    assert kinds(nemotron) == ["linear", "mlp", "full", "linear"]


def test_short_convolution(load) -> None:
    model = load(header_of("lfm2", shortconv__l_cache=3, attention__head_count_kv=[0, 2, 0, 0]))
    assert kinds(model) == ["conv", "full", "conv", "conv"]
    assert model.layers[0].caches[0].content.parts[0].shape == (64, 2)


def test_prediction_layers_are_counted_apart(load) -> None:
    model = load(header_of("glm4moe", nextn_predict_layers=1))
    assert (model.num_layers, len(model.mtp_layers)) == (3, 1)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (header_of("wavtokenizer"), UnsupportedModelError, "'wavtokenizer'.*known: apertus"),
        (header_of("bert", attention__causal=False), UnsupportedModelError, "encoder"),
        (header_of("llama", attention__causal=False), UnsupportedModelError, "cached"),
        (header_of("t5"), UnsupportedModelError, "encoder-decoder"),
        (header_of("llama", block_count=0), ModelError, "num_hidden_layers is 0"),
        (header_of("llama", attention__head_count=0), ModelError, "num_attention_heads is 0"),
        (header_of("deepseek2"), ModelError, "lacks kv_lora_rank|lacks qk_rope_head_dim"),
        (header_of("deci", attention__head_count_kv=[1, 2, 0, 4]), UnsupportedModelError, "'deci'"),
        (header_of("qwen3", attention__head_count_kv=[1, 2, 2, 4]), ModelError, "num_key_value_"),
    ],
)  # fmt: skip
def test_refusals(load, content: GGUF, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(content)
