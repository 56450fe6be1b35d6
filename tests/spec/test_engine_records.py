"""Per-layer facts against what vLLM, SGLang and llama.cpp printed on real machines.

Only the facts of a layer are compared here (heads, dims, latents, states); how an engine rounds
and groups them is the planner's subject.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvern.spec import Heads, Index, Latent, ModelSpec, State, Window
from kvern.spec.configs import load_model_spec


@pytest.fixture(scope="module")
def records(shared_data: Path) -> list[tuple[dict[str, Any], ModelSpec]]:
    lines = (shared_data / "engine_logs" / "records.jsonl").read_text().splitlines()
    pairs = []
    for record in map(json.loads, lines):
        file = shared_data / "model_configs" / record["config_file"]
        pairs.append((record, load_model_spec(file)))
    return pairs


def owned(model: ModelSpec, content: type) -> list[Any]:
    caches = (cache for layer in model.layers for cache in layer.caches)
    return [c for c in caches if isinstance(c.content, content) and c.share_with is None]


def rank_heads(num_kv_heads: int, tp: int) -> int:
    return max(num_kv_heads // tp, 1)


def test_llama_cpp_heads_of_the_layers_it_counts(records) -> None:
    checked = 0
    for record, model in records:
        wanted = record["check_params"] or {}
        if "n_embd_k_gqa" not in wanted:
            continue
        k_width, v_width = wanted["n_embd_k_gqa"], wanted["n_embd_v_gqa"]
        if record["attention"] == "mla stored as MHA":
            nope, rope = model.details["qk_nope_head_dim"], owned(model, Latent)[0].content.rope_dim
            assert model.num_attention_heads * (nope + rope) == k_width
            assert model.num_attention_heads * model.details["v_head_dim"] == v_width
            widths = [(k_width, v_width)] * model.num_layers
        elif owned(model, Latent):
            latents = [cache.content for cache in owned(model, Latent)]
            widths = [(latent.latent_dim + latent.rope_dim, 0) for latent in latents]
        else:
            contents = [cache.content for cache in owned(model, Heads)]
            widths = [(c.num_kv_heads * c.key_dim, c.num_kv_heads * c.value_dim) for c in contents]
            is_window = [isinstance(cache.reach, Window) for cache in owned(model, Heads)]
            if any(is_window) and not all(is_window):  # llama.cpp prints two pools
                part = "swa" in record["id"]
                widths = [
                    w for w, windowed in zip(widths, is_window, strict=True) if windowed == part
                ]
        assert widths == [(k_width, v_width)] * record["printed"]["layers"], record["id"]
        checked += 1
    assert checked >= 20


def test_sglang_bytes_per_token(records) -> None:
    checked = 0
    for record, model in records:
        wanted = (record["check_params"] or {}).get("bytes_per_token")
        if record["engine"] != "sglang" or not isinstance(wanted, dict):
            continue
        tp = record["tensor_parallel"]
        if owned(model, Latent):
            index = (
                132 * len(owned(model, Index)) if "not counted" not in record["attention"] else 0
            )
            latent = 656 if owned(model, Index) else 2 * 576
            assert latent * len(owned(model, Latent)) + index == wanted["KV"], record["id"]
        else:
            caches = owned(model, Heads)
            suffix = "_swa" if "K_swa" in wanted else ""
            if suffix:
                caches = [cache for cache in caches if isinstance(cache.reach, Window)]
            sizes = [(rank_heads(c.content.num_kv_heads, tp), c.content) for c in caches]
            assert sum(2 * n * c.key_dim for n, c in sizes) == wanted["K" + suffix], record["id"]
            assert sum(2 * n * c.value_dim for n, c in sizes) == wanted["V" + suffix], record["id"]
        checked += 1
    assert checked >= 12


def test_state_bytes_of_recurrent_layers(records) -> None:
    checked = 0
    for record, model in records:
        pool = record.get("mamba")
        if pool is None:
            continue
        sizes = {"conv": 0, "recurrent": 0}
        for cache in owned(model, State):
            for part in cache.content.parts:
                sizes[part.name] += part.num_bytes
        slots = pool["max_mamba_cache_size"] + 1
        assert round(slots * sizes["recurrent"] / 2**30, 2) == pool["ssm_GB_printed"], record["id"]
        assert abs(slots * sizes["conv"] / 2**30 - pool["conv_GB_printed"]) <= 0.006, record["id"]
        checked += 1
    assert checked >= 4


def test_vllm_bytes_per_token_and_rank(records) -> None:
    checked = 0
    for record, model in records:
        wanted = (record["check_params"] or {}).get("bytes_per_token_per_rank")
        if record["engine"] != "vllm" or wanted is None:
            continue
        tp, narrow = record["tensor_parallel"], record["kv_cache_dtype"].startswith("fp8")
        width = 1 if narrow else 2
        total = 0
        for cache in owned(model, Heads):
            content = cache.content
            heads = rank_heads(content.num_kv_heads, tp)
            total += heads * (content.key_dim + content.value_dim) * width
        num_draft = len(model.mtp_layers) if record["kv_cache_dtype"] == "fp8_ds_mla" else 0
        for _ in range(len(owned(model, Latent)) + (num_draft if owned(model, Latent) else 0)):
            content = owned(model, Latent)[0].content
            total += 656 if narrow else 2 * (content.latent_dim + content.rope_dim)
        for _ in range(len(owned(model, Index)) + (num_draft if owned(model, Index) else 0)):
            total += 132 if narrow else 2 * owned(model, Index)[0].content.dim
        assert total == wanted, record["id"]
        checked += 1
    assert checked >= 20
