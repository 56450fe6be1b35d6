"""Decoding and prefill of one small model per kind of family, with random weights.

Run: ``python benchmarks/family_models.py [--threads N] [--cpu-time] [--json] [--only KIND]``. Native backend,
bfloat16 weights and cache, 1,024 wide (GPT-2: 768), four to six layers, 4,096 words, about 1,024 tokens cached;
the least of several steps, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvern.kernels.native import NativeBackend
from kvern.kernels.protocol import AttendBatch, HostTensor, PagedStream
from kvern.models.attention import LayerCache
from kvern.models.caches import state_shapes
from kvern.models.config import LayerConfig
from kvern.models.decoder import Decoder
from kvern.models.families import family_of
from kvern.models.workspace import Workspace
from kvern.spec.content import StatePart
from kvern.spec.pages import StateOffset
from kvern.store.dtypes import encode

BLOCK_SIZE, PREFILL, CONTEXT, DECODE = 16, 256, 1024, 24
BASE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"architectures": ["LlamaForCausalLM"]},
    "Qwen2, biases": {"architectures": ["Qwen2ForCausalLM"]},
    "Qwen3, q and k norms": {"architectures": ["Qwen3ForCausalLM"]},
    "Gemma 2, caps and four norms": {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 512,
    },
    "GPT-2, layer norms": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 768,
        "n_layer": 6,
        "n_head": 12,
        "n_positions": 2048,
        "layer_norm_epsilon": 1e-5,
    },
    "GPT-NeoX, parallel": {
        "architectures": ["GPTNeoXForCausalLM"],
        "rotary_pct": 0.25,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "num_key_value_heads": 16,
    },
    "Qwen3-MoE, experts": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
    "gpt-oss, sinks and experts": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 512,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "DeepSeek V2, latent and experts": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_key_value_heads": 16,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_hidden_layers": 4,
    },
    "Qwen3-Next, gated delta net": {
        "architectures": ["Qwen3NextForCausalLM"],
        **EXPERTS,
        "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "num_hidden_layers": 4,
    },
    "Granite 4 H, Mamba-2": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba"] * 5 + ["attention"],
        "shared_intermediate_size": 2816,
        "num_local_experts": 0,
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "position_embedding_type": "nope",
    },
    "LFM2, short convolution": {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "conv", "full_attention"] * 2,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
    },
}


class RandomWeights:
    """Whatever tensor a decoder asks for: bfloat16 matrices and float32 vectors of small random numbers."""

    path = Path("random weights")
    is_gguf = False

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._rng = np.random.default_rng(0)

    def __contains__(self, name: str) -> bool:
        return name.startswith("model.embed") or name == "transformer.wte.weight"

    def matrix(self, name: str, rows: int, cols: int) -> HostTensor:
        """See `WeightSource.matrix`."""
        data = encode(self.array(name, rows, cols), "bf16").reshape(-1)
        return HostTensor(name, "BF16", rows, cols, data)

    def matrices(self, name: str, count: int, rows: int, cols: int) -> list[HostTensor]:
        """See `WeightSource.matrices`."""
        return [self.matrix(name, rows, cols) for _ in range(count)]

    def vector(self, name: str, size: int) -> np.ndarray:
        """See `WeightSource.vector`."""
        return np.float32(0.5) + self.array(name, size)

    def array(self, name: str, *shape: int) -> np.ndarray:
        """See `WeightSource.array`."""
        return self._rng.normal(0, 0.03, shape).astype(np.float32)


class Sequence:
    """One sequence's cache and the batches of its steps."""

    def __init__(self, decoder: Decoder) -> None:
        self._hidden_size, self._num_pages = decoder.config.hidden_size, 1
        self.cache = [self._cache(layer) for layer in decoder.config.layers]

    def _cache(self, layer: LayerConfig) -> LayerCache:
        if layer.state is not None:
            parts, offset = [], 0
            for name, shape in state_shapes(layer, self._hidden_size):
                part = StatePart(name, shape, "fp32")
                parts.append(StateOffset(0, part, offset, part.num_bytes))
                offset += part.num_bytes
            return LayerCache.of_state(1, np.zeros((2, offset), np.uint8), tuple(parts))
        dims = [(layer.num_kv_heads, layer.key_dim), (layer.num_kv_heads, layer.value_dim)]
        if layer.latent is not None:
            dims = [(1, layer.latent.latent_dim + layer.latent.rope_dim)]
        pages = 2 + CONTEXT // BLOCK_SIZE * 2
        streams = [
            PagedStream(
                np.zeros((pages, heads * BLOCK_SIZE * dim * 2), np.uint8),
                0,
                "bf16",
                heads,
                BLOCK_SIZE,
                dim,
            )
            for heads, dim in dims
        ]
        return LayerCache.of(0, tuple(streams))

    def batches(self, start: int, count: int) -> list[AttendBatch]:
        """Of the attention layers and of the states."""
        positions = np.arange(start, start + count, dtype=np.int32)
        table = np.arange(1, 1 + CONTEXT // BLOCK_SIZE * 2, dtype=np.int32)[None]
        slots = table[0, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
        rows = np.array([0, count], np.int32), np.array([start + count], np.int32)
        slots += positions % BLOCK_SIZE
        entry = np.ones((1, 1), np.int32)
        return [AttendBatch(*rows, tables, positions, slots) for tables in (table, entry)]


def measure(
    config: dict[str, Any], backend: NativeBackend, clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds per prefill token (in chunks of 256) and per decoded token at about 1,024."""
    family = family_of(config)
    decoder = Decoder(family.describe(config), family, RandomWeights(), backend)  # type: ignore[arg-type]
    sequence, workspace = Sequence(decoder), Workspace(decoder.config, PREFILL)
    logits = np.empty((1, decoder.config.vocab_size), np.float32)
    rng, times = np.random.default_rng(1), {"prefill": [], "decode": []}  # type: ignore[var-annotated]

    def step(start: int, count: int) -> float:
        tokens = rng.integers(0, decoder.config.vocab_size, count).astype(np.int32)
        batches = sequence.batches(start, count)
        started = clock()
        hidden, _ = decoder.forward(tokens, batches, sequence.cache, workspace)
        decoder.logits(hidden[-1:], logits)
        return 1000 * (clock() - started)

    for start in range(0, CONTEXT, PREFILL):
        times["prefill"].append(step(start, PREFILL))
    for start in range(CONTEXT, CONTEXT + DECODE):
        times["decode"].append(step(start, 1))
    return {
        "decode_ms": min(times["decode"][2:]),
        "prefill_ms_per_token": min(times["prefill"][1:]) / PREFILL,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help="a part of the kind's name")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="on a machine that others use too")
    args = parser.parse_args()
    backend = NativeBackend(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    results = {}
    for kind, fields in KINDS.items():
        if args.only and args.only not in kind:
            continue
        results[kind] = row = measure({**BASE, **fields}, backend, clock)
        if not args.json:
            print(
                f"{kind:34} decode {row['decode_ms']:8.2f} ms"
                f"   prefill {row['prefill_ms_per_token']:7.3f} ms a token",
                flush=True,
            )
    if args.json:
        print(json.dumps({"backend": backend.kernel_path, "results": results}))


if __name__ == "__main__":
    main()
