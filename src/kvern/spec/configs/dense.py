"""Families whose layers all keep keys and values per head: MHA, GQA, MQA, with and without windows.

One entry per `model_type`. What differs between them is the order of full and window layers, and
which vectors (biases, norms) stand beside the matrices.
"""

from __future__ import annotations

from typing import Any

from kvern.spec.configs.caches import Caches, heads, indexed_attention
from kvern.spec.configs.family import (
    HEADS_BY_KIND,
    Family,
    share_with_last_of_kind,
    variants,
)
from kvern.spec.configs.reader import Config
from kvern.spec.configs.schedule import (
    CHUNKED,
    FULL,
    SLIDING,
    Kinds,
    all_full,
    full_every,
    window_everywhere_if_used,
    window_from_layer,
    window_if_set,
)
from kvern.spec.configs.weights import Block, Moe
from kvern.spec.reach import All, Window


def _llama4_kinds(config: Config) -> Kinds:
    """Layers without rotary embedding are full, the others see their own chunk."""
    num_layers = config.num_layers
    has_rope = config.integers("no_rope_layers")
    if not has_rope:
        interval = config.integer("no_rope_layer_interval", default=4)
        has_rope = tuple(int((i + 1) % interval != 0) for i in range(num_layers))
    chunked = config.get("attention_chunk_size") is not None
    return tuple(CHUNKED if rope and chunked else FULL for rope in has_rope)


def _dots1_kinds(config: Config) -> Kinds:
    """A window from layer `max_window_layers` on, which usually is behind the last."""
    if config.get("sliding_window") is None:
        return all_full(config)
    first = config.integer("max_window_layers", default=62, minimum=0)
    return tuple(SLIDING if i >= first else FULL for i in range(config.num_layers))


def _smollm3_kinds(config: Config) -> Kinds:
    """Windows, where used at all, are in the layers that have no rotary embedding."""
    if not config.flag("use_sliding_window") or config.get("sliding_window") is None:
        return all_full(config)
    has_rope = config.integers("no_rope_layers", config.num_layers)
    if has_rope is None:
        interval = config.integer("no_rope_layer_interval", default=4)
        has_rope = tuple(int((i + 1) % interval != 0) for i in range(config.num_layers))
    return tuple(FULL if rope else SLIDING for rope in has_rope)


def _exaone4_kinds(config: Config) -> Kinds:
    """`sliding_window_pattern` is a period or a string such as "LLLG", G standing for full."""
    pattern = config.get("sliding_window_pattern")
    if config.get("sliding_window") is None or pattern in (0, ""):
        return all_full(config)
    is_text = isinstance(pattern, str)
    period = len(pattern) if is_text else config.integer("sliding_window_pattern", default=4)
    return tuple(SLIDING if (i + 1) % period else FULL for i in range(config.num_layers))


def _gemma4_full(config: Config) -> Caches:
    """Full layers have their own head dim, and their own KV heads where K equals V.

    transformers writes them as `per_layer_config`: layer number -> fields, full layers only.
    """
    values = dict(config.values)
    if config.get("per_layer_config") is not None:
        own = config.table("per_layer_config")
        first = own.table(*own.values) if own.values else own
        if any(entry != first.values for entry in own.values.values()):
            config.refuse("per_layer_config says different things of full layers")
        return heads(Config({**values, **first.values}, config.source), All())
    values["head_dim"] = config.integer("global_head_dim", default=512)
    kv_heads = config.optional_integer("num_global_key_value_heads")
    if kv_heads is not None and config.flag("attention_k_eq_v", default=True):
        values["num_key_value_heads"] = kv_heads
    return heads(Config(values, config.source), All())


def _gemma4_kinds(config: Config) -> Kinds:
    kinds = full_every(6)(config)
    return (*kinds[:-1], FULL)


def _mimo_sliding(config: Config) -> Caches:
    """Window layers have twice the KV heads unless stated, and may have their own dims."""
    values = dict(config.values)
    kv_heads = config.optional_integer("swa_num_key_value_heads")
    values["num_key_value_heads"] = kv_heads or 2 * config.num_kv_heads
    for name in ("head_dim", "v_head_dim"):
        values[name] = config.get(f"swa_{name}", name)
    # `sliding_window_size` counts the tokens before the query, `sliding_window` includes it.
    before = config.optional_integer("sliding_window_size")
    size = config.integer("sliding_window") if before is None else before + 1
    return heads(Config(values, config.source), Window(size))


def _mimo_kinds(config: Config) -> Kinds:
    pattern = config.integers("hybrid_layer_pattern", config.num_layers)
    if pattern is not None:
        return tuple(SLIDING if sliding else FULL for sliding in pattern)
    return tuple(FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(config.num_layers))


def _optionally_biased(**differences: Any) -> Block:
    """A block whose attention has biases where `attention_bias` says so."""
    return Block(qkv_bias="attention_bias", out_bias="attention_bias", **differences)


LLAMA = _optionally_biased(mlp_bias="mlp_bias")
QWEN2 = Block(qkv_bias=True)
QWEN3 = _optionally_biased(qk_norm="head")
GEMMA2 = _optionally_biased(num_norms=4)
GEMMA3 = _optionally_biased(qk_norm="head", num_norms=4)
LLAMA4 = _optionally_biased(
    moe=Moe(
        ("intermediate_size",),
        ("intermediate_size_mlp",),
        shared_width="intermediate_size",
        every=("interleave_moe_layer_step", "_moe_offset"),
    ),
)
MIXTRAL = Moe(("intermediate_size",))
QWEN_MOE = Moe(every=("decoder_sparse_step", "_moe_offset"))

DENSE_FAMILIES: tuple[Family, ...] = (
    # ------------------------------------------------------------------ full attention throughout
    Family("llama", block=LLAMA),
    *variants(Family("helium", block=LLAMA), "helium", "exaone", "internlm3"),
    Family("arcee", block=_optionally_biased(gated_mlp=False)),
    Family(
        "ernie4_5", block=Block("use_bias", "use_bias", mlp_bias="use_bias"), ties_embeddings=True
    ),
    Family("glm", block=Block("attention_bias")),
    Family(
        "glm4",
        block=Block("attention_bias", num_norms=4),
    ),
    Family("hunyuan_v1_dense", block=QWEN3),
    Family("smollm3", _smollm3_kinds, block=LLAMA, ties_embeddings=True),
    Family("granite", block=LLAMA),
    Family("qwen2", window_from_layer, block=QWEN2),
    Family("qwen3", window_from_layer, block=QWEN3),
    Family("seed_oss", block=Block(qkv_bias="attention_bias", out_bias="attention_out_bias")),
    Family("olmo", block=_optionally_biased(num_norms=0), final_norm=0),
    Family("olmo2", block=_optionally_biased(qk_norm="full")),
    Family("cohere", block=_optionally_biased(num_norms=1), ties_embeddings=True),
    Family("gemma", block=_optionally_biased(), ties_embeddings=True),
    Family(
        "nemotron",
        block=_optionally_biased(gated_mlp=False, mlp_bias="mlp_bias", norm_bias=True),
        final_norm=2,
    ),
    *variants(Family("apertus"), "apertus", "stablelm"),
    # ------------------------------------------------------------------------- one window for all
    Family("mistral", window_if_set, block=Block()),
    *variants(Family("ministral", window_if_set, block=Block()), "ministral", "ministral3"),
    Family("phi3", window_if_set, block=Block()),
    Family(
        "starcoder2",
        window_if_set,
        block=Block("use_bias", "use_bias", gated_mlp=False, mlp_bias="use_bias", norm_bias=True),
        final_norm=2,
        ties_embeddings=True,
    ),
    # --------------------------------------------------------------- windows between full layers
    Family("gemma2", full_every(2), block=GEMMA2, ties_embeddings=True),
    *variants(
        Family(
            "gemma3_text",
            full_every(6, SLIDING, "sliding_window_pattern", "_sliding_window_pattern"),
            block=GEMMA3,
            ties_embeddings=True,
        ),
        "gemma3_text",
        "gemma3",
    ),
    *variants(
        Family("gemma3n_text", full_every(5), share=share_with_last_of_kind, ties_embeddings=True),
        "gemma3n_text",
        "gemma3n",
    ),
    *variants(
        Family(
            "gemma4_text",
            _gemma4_kinds,
            {FULL: _gemma4_full, SLIDING: HEADS_BY_KIND[SLIDING]},
            share=share_with_last_of_kind,
            ties_embeddings=True,
        ),
        "gemma4_text",
        "gemma4",
        "gemma4_unified",
        "gemma4_unified_text",
    ),
    Family("vaultgemma", full_every(2), block=_optionally_biased()),
    Family("olmo3", full_every(4), block=_optionally_biased(qk_norm="full")),
    Family(
        "cohere2",
        full_every(4, SLIDING, "sliding_window_pattern"),
        block=_optionally_biased(num_norms=1),
        ties_embeddings=True,
    ),
    Family("exaone4", _exaone4_kinds, block=QWEN3),
    # ------------------------------------------------------------------------------------ experts
    Family("mixtral", window_if_set, block=Block(moe=MIXTRAL)),
    Family("phimoe", window_if_set),
    Family("granitemoe", block=_optionally_biased(moe=MIXTRAL)),
    Family(
        "granitemoeshared",
        block=_optionally_biased(
            moe=Moe(("intermediate_size",), shared_width="shared_intermediate_size"),
        ),
    ),
    Family(
        "qwen2_moe",
        window_from_layer,
        block=Block(
            qkv_bias=True,
            moe=Moe(
                every=QWEN_MOE.every,
                shared_width="shared_expert_intermediate_size",
                shared_gate=True,
            ),
        ),
    ),
    Family(
        "qwen3_moe",
        window_everywhere_if_used,
        block=_optionally_biased(qk_norm="head", moe=QWEN_MOE),
    ),
    Family(
        "olmoe",
        block=_optionally_biased(qk_norm="full", moe=Moe(("intermediate_size",))),
    ),
    Family("ernie4_5_moe"),
    Family("flex_olmo", block=_optionally_biased(qk_norm="full", moe=MIXTRAL)),
    Family(
        "hunyuan_v1_moe",
        block=_optionally_biased(
            qk_norm="head", moe=Moe(("intermediate_size",), shared_width="intermediate_size")
        ),
    ),
    Family(
        "dots1",
        _dots1_kinds,
        block=_optionally_biased(
            qk_norm="head",
            moe=Moe(
                shared_count="n_shared_experts",
                correction_bias=True,
                dense_first="first_k_dense_replace",
            ),
        ),
    ),
    Family(
        "minimax_m2",
        block=Block(qk_norm="full", moe=Moe(("intermediate_size",), correction_bias=True)),
    ),
    Family(
        "glm4_moe",
        block=Block(
            qkv_bias="attention_bias",
            moe=Moe(
                shared_count="n_shared_experts",
                correction_bias=True,
                dense_first="first_k_dense_replace",
            ),
        ),
    ),
    Family(
        "gpt_oss",
        full_every(2),
        block=Block(True, True, sinks=True, moe=Moe(("intermediate_size",), bias=True)),
    ),
    *variants(Family("llama4_text", _llama4_kinds, block=LLAMA4), "llama4_text", "llama4"),
    Family("laguna"),
    Family("mimo_v2_flash", _mimo_kinds, {FULL: HEADS_BY_KIND[FULL], SLIDING: _mimo_sliding}),
    *variants(
        Family(
            "minimax_m3_vl_text",
            caches={FULL: HEADS_BY_KIND[FULL], "minimax_m3_sparse": indexed_attention},
        ),
        "minimax_m3_vl_text",
        "minimax_m3_vl",
    ),
)
