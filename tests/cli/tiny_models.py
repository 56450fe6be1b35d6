"""Models of a few kilobytes, whole or broken in one way."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 16, 32, 2, 1, 8, 24
GGUF_SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
    "blk.0.ffn_up.weight": (FEED_FORWARD, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, FEED_FORWARD),
}
HF_SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "model.layers.0.mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    changed_shapes: dict[str, tuple[int, ...]] | None = None,
    missing: str | None = None,
) -> Path:
    """A one-layer llama in GGUF, with the tensors that `changed_shapes` and `missing` spoil."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|endoftext|>", *(chr(33 + i) for i in range(VOCAB - 1))])
    writer.add_token_types([3, *([1] * (VOCAB - 1))])
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, shape in {**GGUF_SHAPES, **(changed_shapes or {})}.items():
        if name != missing:
            writer.add_tensor(name, _values(name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hf_folder(folder: Path, architecture: str = "LlamaForCausalLM") -> Path:
    """A one-layer llama as a Hugging Face folder without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: _values(name, shape) for name, shape in HF_SHAPES.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    seed = np.random.default_rng(sum(map(ord, name)))
    return seed.normal(0, 0.1, shape).astype(np.float32)
