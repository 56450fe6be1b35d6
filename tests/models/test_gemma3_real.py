"""The real Gemma 3 270M, from its GGUF file, against transformers' reading of the same file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.harness import Pool, assert_agrees, backend_of

from kvern.models.decoder import Decoder
from kvern.models.families import family_of
from kvern.models.weights import open_weights
from kvern.models.workspace import Workspace
from kvern.spec.configs import read_config
from kvern.spec.gguf import read_header

pytestmark = pytest.mark.full

WINDOW = 512
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3)


@pytest.fixture(scope="module")
def theirs(gemma3_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, and transformers' float32 logits after each of `LENGTHS` of them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gemma3_path.parent,
        gguf_file=gemma3_path.name,
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    rng = np.random.default_rng(3)
    ids = np.concatenate([[2], rng.integers(0, 262144, LENGTHS[-1] - 1)]).astype(np.int32)
    with torch.no_grad():
        hidden = model.model(torch.tensor(ids[None].astype(np.int64)), use_cache=False)
        rows = hidden.last_hidden_state[0, [n - 1 for n in LENGTHS]]
        return ids, model.lm_head(rows).numpy()


def last_logits(decoder: Decoder, ids: np.ndarray, chunks: Sequence[int]) -> np.ndarray:
    """Logits after each of `LENGTHS`, which must be ends of chunks."""
    pool = Pool(decoder, [len(ids)])
    workspace = Workspace(decoder.config, max(chunks))
    rows, done = [], 0
    for size in chunks:
        parts = [(0, done, size)]
        batches = [pool.batch(parts), pool.state_batch(parts)]
        hidden, _ = decoder.forward(ids[done : done + size], batches, pool.cache, workspace)
        done += size
        pool.forget_unreachable(0, done)
        if done in LENGTHS:
            out = np.empty((1, decoder.config.vocab_size), np.float32)
            decoder.logits(np.ascontiguousarray(hidden[-1:]), out)
            rows.append(out)
    return np.concatenate(rows)


def decoder_on(backend: Any, path: Path, weights_format: str) -> Decoder:
    header = read_header(path)
    config = read_config(header)
    family = family_of(config, header.architecture)
    source = open_weights(path, header)
    return Decoder(family.describe(config), family, source, backend, weights_format)


def test_logits_agree_around_the_window(
    gemma3_path: Path, theirs: tuple[np.ndarray, np.ndarray], request: pytest.FixtureRequest
) -> None:
    ids, expected = theirs
    ways = {"reference": [(511, 1, 1, 514)]}
    ways["native"] = [(511, 1, 1, 514), (100, 411, 1, 1, 7, 507)]
    for name, chunkings in ways.items():
        decoder = decoder_on(backend_of(name, request), gemma3_path, "fp32")
        for chunks in chunkings:
            assert_agrees(last_logits(decoder, ids, chunks), expected)


def test_stored_weights_give_the_same_bits_in_every_chunking(
    gemma3_path: Path, request: pytest.FixtureRequest
) -> None:
    decoder = decoder_on(backend_of("native", request), gemma3_path, "auto")
    ids = np.random.default_rng(3).integers(0, 262144, LENGTHS[-1]).astype(np.int32)
    one = last_logits(decoder, ids, (511, 1, 1, 514))
    for chunks in ((64,) * 7 + (63, 1, 1, 13, 501), (500, *[1] * 20, 507)):
        assert np.array_equal(last_logits(decoder, ids, chunks), one)
