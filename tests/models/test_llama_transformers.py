"""Random-weight Llama models, saved by transformers and run by kvern: float32 logits agree.

Agree means: every logit within 2e-4 of its row's logit range.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvern.kernels.protocol import AttendBatch, Backend, PagedStream
from kvern.kernels.reference import ReferenceBackend
from kvern.models.decoder import Decoder, LayerCache
from kvern.models.families import family_of
from kvern.models.weights import open_weights
from kvern.models.workspace import Workspace

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-4

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha-untied": {"num_key_value_heads": 6, "tie_word_embeddings": False},
    "mqa": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear-rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3-rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn-rope": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "head-dim": {"head_dim": 24},
    "bf16-file": {"torch_dtype": "bfloat16"},
}


def save_model(folder: Path, changes: dict[str, Any], sharded: bool = False) -> Any:
    """A small Llama saved as a folder; returns the transformers model in float32."""
    torch.manual_seed(1)
    fields: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 199,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        **changes,
    }
    dtype = fields.pop("torch_dtype", "float32")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="100KB" if sharded else "1GB")
    # Loaded again: .to(bfloat16).float() would leave rounded rotary frequencies behind.
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def decoder_of(folder: Path, backend: Backend) -> Decoder:
    import json

    config = json.loads((folder / "config.json").read_text())
    family = family_of(config)
    return Decoder(family.describe(config), family, open_weights(folder), backend, "fp32")


def run_chunks(decoder: Decoder, ids: np.ndarray, chunks: list[int], block_size: int = 4) -> np.ndarray:
    """Logits of every position, computed chunk by chunk over one paged cache."""
    config = decoder.config
    layer = config.layers[0]
    stream_bytes = layer.num_kv_heads * block_size * layer.key_dim * 4
    num_blocks = 1 + -(-len(ids) // block_size)
    pages = np.zeros((num_blocks, 2 * stream_bytes * len(config.layers)), np.uint8)
    shape = ("fp32", layer.num_kv_heads, block_size, layer.key_dim)
    cache = [
        LayerCache(
            PagedStream(pages, 2 * i * stream_bytes, *shape),
            PagedStream(pages, (2 * i + 1) * stream_bytes, *shape),
            0,
        )
        for i in range(len(config.layers))
    ]
    table = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).astype(np.int32)
    workspace = Workspace(config, max(chunks))
    rows, start = [], 0
    for size in chunks:
        positions = np.arange(start, start + size, dtype=np.int32)
        slots = table[positions // block_size].astype(np.int64) * block_size + positions % block_size
        batch = AttendBatch(
            np.array([0, size], np.int32),
            np.array([start + size], np.int32),
            table[None],
            positions,
            slots,
        )
        hidden, _ = decoder.forward(ids[start : start + size], [batch], cache, workspace)
        out = np.empty((size, config.vocab_size), np.float32)
        decoder.logits(hidden, out)
        rows.append(out)
        start += size
    assert start == len(ids)
    return np.concatenate(rows)


def assert_agrees(ours: np.ndarray, theirs: np.ndarray) -> None:
    spread = theirs.max(-1, keepdims=True) - theirs.min(-1, keepdims=True)
    assert np.max(np.abs(ours - theirs) / spread) < TOLERANCE


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits_agree_in_one_pass_in_chunks_and_token_by_token(tmp_path: Path, variant: str) -> None:
    model = save_model(tmp_path, VARIANTS[variant])
    ids = np.random.default_rng(5).integers(0, 199, 90).astype(np.int32)
    with torch.no_grad():
        theirs = model(torch.tensor(ids[None].astype(np.int64))).logits[0].numpy()
    decoder = decoder_of(tmp_path, ReferenceBackend())
    for chunks in ([90], [1] * 90, [7, 1, 30, 2, 50]):
        assert_agrees(run_chunks(decoder, ids, chunks), theirs)


def test_a_sharded_folder_loads_like_a_single_file(tmp_path: Path) -> None:
    model = save_model(tmp_path, {}, sharded=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = np.arange(20, dtype=np.int32)
    with torch.no_grad():
        theirs = model(torch.tensor(ids[None].astype(np.int64))).logits[0].numpy()
    assert_agrees(run_chunks(decoder_of(tmp_path, ReferenceBackend()), ids, [20]), theirs)
