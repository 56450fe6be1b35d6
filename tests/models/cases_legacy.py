"""Families from before the common layout, and layer norms: GPT, Falcon, OPT, StarCoder2."""

from __future__ import annotations

from tests.models.case_fields import small
from tests.models.harness import Case

LEGACY = [
    Case(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "vocab_size": 151,
            "num_hidden_layers": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "openai-community--gpt2.json",
        drop=(
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ),
    ),
    Case(
        "pythia",
        "GPTNeoXForCausalLM",
        small(num_key_value_heads=4),
        "EleutherAI--pythia-1.4b.json",
        drop=("head_dim", "num_key_value_heads"),
    ),
    Case(
        "gpt-neox-serial",
        "GPTNeoXForCausalLM",
        small(num_key_value_heads=4, use_parallel_residual=False, rotary_pct=0.5),
    ),
    Case(
        "falcon-7b",
        "FalconForCausalLM",
        small(multi_query=True, bias=False),
        "tiiuae--falcon-7b.json",
        drop=("head_dim", "num_key_value_heads", "num_kv_heads"),
    ),
    Case("falcon-40b", "FalconForCausalLM", small(new_decoder_architecture=True, num_kv_heads=2)),
    Case(
        "falcon-serial",
        "FalconForCausalLM",
        small(multi_query=False, parallel_attn=False, bias=True),
    ),
    Case(
        "starcoder2",
        "Starcoder2ForCausalLM",
        small(sliding_window=9),
        "bigcode--starcoder2-3b.json",
        drop=("head_dim",),
    ),
    Case(
        "opt",
        "OPTForCausalLM",
        {
            k: v
            for k, v in small(ffn_dim=96, word_embed_proj_dim=64, init_std=0.2).items()
            if k not in ("intermediate_size", "num_key_value_heads")
        },
        "facebook--opt-125m.json",
        drop=("num_key_value_heads", "head_dim"),
    ),
    Case(
        "gptj",
        "GPTJForCausalLM",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 8,
            "vocab_size": 151,
            "num_hidden_layers": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "EleutherAI--gpt-j-6B.json",
        drop=(
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ),
    ),
]
