"""A very small Llama with random weights, so that lifecycle tests take milliseconds a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvern import LLM

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A loadable folder without tokenizer; logits are spread enough that greedy answers vary."""
    from safetensors.numpy import save_file

    config = {**TINY, **changes}
    rng = np.random.default_rng(seed)
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (rng.normal(size=(rows, cols)) * 1.5 / cols**0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": rng.normal(size=(vocab, hidden)).astype(np.float32),
        "lm_head.weight": matrix(vocab, hidden) * 2,
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for i in range(config["num_hidden_layers"]):
        base = f"model.layers.{i}."
        tensors |= {
            base + "input_layernorm.weight": np.ones(hidden, np.float32),
            base + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            base + "self_attn.q_proj.weight": matrix(q, hidden),
            base + "self_attn.k_proj.weight": matrix(kv, hidden),
            base + "self_attn.v_proj.weight": matrix(kv, hidden),
            base + "self_attn.o_proj.weight": matrix(hidden, q),
            base + "mlp.gate_proj.weight": matrix(inner, hidden),
            base + "mlp.up_proj.weight": matrix(inner, hidden),
            base + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small random Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def make_tiny(tiny_model: Path) -> Any:
    """Engines on the small model: ``make_tiny(block_size=4, kv_memory="64KiB")``."""
    import warnings

    def make(**options: Any) -> LLM:
        defaults = {"kv_memory": "1MiB", "block_size": 16, "max_model_len": 512, "threads": 2}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return LLM(tiny_model, **{**defaults, **options})

    return make


@pytest.fixture
def prompts() -> list[list[int]]:
    """Twelve prompts of 1 to 120 token ids; the later half shares its first 40 tokens."""
    rng = np.random.default_rng(4)
    shared = rng.integers(0, 300, 40).tolist()
    lengths = [1, 2, 15, 16, 17, 33, 41, 48, 64, 80, 100, 120]
    return [
        rng.integers(0, 300, n).tolist()
        if n <= 40
        else shared + rng.integers(0, 300, n - 40).tolist()
        for n in lengths
    ]
