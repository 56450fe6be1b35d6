"""The exactness test that every family goes through.

A small random-weight model is saved by transformers,
loaded by kvern, compared logit by logit in float32.

Agree means: every logit lies within 2e-4 of its row's logit range. On a backend that promises it,
every way of computing a sequence must also give the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from kvern.kernels.native import NativeBackend
from kvern.kernels.protocol import AttendBatch, Backend, PagedStream
from kvern.kernels.reference import ReferenceBackend
from kvern.models.caches import state_shapes
from kvern.models.config import LayerConfig
from kvern.models.decoder import Decoder, LayerCache
from kvern.models.families import family_of
from kvern.models.weights import open_weights
from kvern.models.workspace import Workspace
from kvern.spec.content import StatePart
from kvern.spec.pages import StateOffset

TOLERANCE = 2e-4
BLOCK_SIZE = 4
PAGE_BYTES = 1000
"""Of state entries: no multiple of anything."""
CONFIGS = Path(__file__).parents[3] / "shared" / "data" / "model_configs"

Schedule = list[list[tuple[int, int]]]
"""Steps; each a batch of (sequence, number of its next tokens)."""


@dataclass(frozen=True)
class Case:
    """A small model.

    Attributes:
        family: for the test's name.
        model: class name of the model in transformers; its configuration class is found from it.
        fields: configuration fields; widths are small, and every layer kind is present.
        real: file in ``shared/data/model_configs`` whose other fields are taken instead of
            transformers' defaults, where the folder is there.
        prepare: changes the transformers model before it is saved.
    """

    family: str
    model: str
    fields: dict[str, Any]
    real: str | None = None
    prepare: Callable[[Any], None] | None = None
    config_class: str | None = None
    drop: tuple[str, ...] = ()
    marks: tuple[Any, ...] = field(default=())


def real_fields(case: Case) -> dict[str, Any]:
    """Fields of the real configuration with the case's cuts; skips where the file is absent."""
    if case.real is None:
        pytest.skip(f"no real configuration of {case.family} is at hand")
    path = CONFIGS / case.real
    if not path.exists():
        pytest.skip(
            f"{path.name} is not there: shared/data/model_configs lies beside the repository"
        )
    real = json.loads(path.read_text())
    text = real.pop("text_config", {})
    real = {**real, **text}
    unwanted = {"architectures", "model_type", "torch_dtype", "dtype", *case.drop}
    kept = {k: v for k, v in real.items() if not k.startswith("_") and k not in unwanted}
    count = case.fields["num_hidden_layers"]
    kinds = kept.get("layer_types")
    if kinds and "layer_types" not in case.fields:
        kept["layer_types"] = kinds[:count]
        assert set(kept["layer_types"]) == set(kinds), "the cut must keep every layer kind"
    return {**kept, **case.fields}


def save_model(
    folder: Path, case: Case, fields: dict[str, Any] | None = None, dtype: str = "float32"
) -> Any:
    """Save the case's model with random weights; returns transformers' own, loaded in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model_class = getattr(transformers, case.model)
    config_class = (
        getattr(transformers, case.config_class) if case.config_class else model_class.config_class
    )
    config = config_class(
        **{"initializer_range": 0.2, **(case.fields if fields is None else fields)}
    )
    config._attn_implementation = "eager"
    model = model_class(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            randomize(torch, name, tensor)
    if case.prepare is not None:
        case.prepare(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    loaded = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return loaded.eval()


def randomize(torch: Any, name: str, tensor: Any) -> None:
    """Weights that a constant start would leave without effect: norms, biases, sinks, routers."""
    last = name.rsplit(".", 1)[-1]
    is_scale = "router" in name and "scale" in last
    ones = ("D", "dt_bias", "layer_scalar", "correct_output_scale")
    if "norm" in name or "ln_" in name or last in ones or is_scale:
        tensor.add_(torch.randn_like(tensor), alpha=0.3)
    elif last in ("bias", "sinks", "e_score_correction_bias") or last.endswith("_bias"):
        torch.nn.init.normal_(tensor, std=0.3)
    elif tensor.dim() >= 2 and float(tensor.float().abs().max()) < 1e-6:
        torch.nn.init.normal_(tensor, std=0.2)


def their_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """Logits of every position by transformers, one full pass."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return (
            model(torch.tensor(ids[None].astype(np.int64)), use_cache=False)
            .logits[0]
            .float()
            .numpy()
        )


@dataclass(frozen=True)
class Saved:
    """A saved model and transformers' answers to it."""

    folder: Path
    model: Any

    @classmethod
    def of(cls, folder: Path, case: Case, fields: dict[str, Any] | None = None) -> Saved:
        return cls(folder, save_model(folder, case, fields))

    def logits(self, ids: np.ndarray) -> np.ndarray:
        return their_logits(self.model, ids)


class SavedModels(Protocol):
    """What the fixture ``saved`` is."""

    def __call__(self, case: Case, is_real: bool = False) -> Saved: ...


def backend_of(name: str, request: pytest.FixtureRequest) -> Backend:
    """A backend; without the extension a native test is skipped, or fails if it must be there."""
    if name == "native":
        request.getfixturevalue("require_native")
        return NativeBackend(2)
    return ReferenceBackend()


def random_ids(decoder: Decoder, count: int, seed: int = 5) -> np.ndarray:
    """Token ids, int32 ``[count]``."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, decoder.config.vocab_size, count).astype(np.int32)


def decoder_of(folder: Path, backend: Backend, weights_format: str = "fp32") -> Decoder:
    """The folder's decoder."""
    config = json.loads((folder / "config.json").read_text())
    family = family_of(config)
    return Decoder(family.describe(config), family, open_weights(folder), backend, weights_format)


class Pool:
    """A paged cache for a few sequences; slots that no query may read hold NaN."""

    def __init__(self, decoder: Decoder, lengths: Sequence[int], dtype: str = "fp32") -> None:
        self.layers = decoder.config.layers
        self.hidden_size = decoder.config.hidden_size
        self.num_state_pages = 0
        widths = [-(-length // BLOCK_SIZE) for length in lengths]
        ids = np.random.default_rng(0).permutation(np.arange(1, 1 + sum(widths))).astype(np.int32)
        self.tables = np.split(ids, np.cumsum(widths)[:-1])
        self.cache = [self._layer_cache(layer, 1 + sum(widths), dtype) for layer in self.layers]

    def _layer_cache(self, layer: LayerConfig, num_blocks: int, dtype: str) -> LayerCache:
        size = 4 if dtype == "fp32" else 2
        if layer.state is not None:
            return self._state_cache(layer, dtype)
        if not layer.has_mixer or layer.share_with is not None:
            return LayerCache.none()

        def stream(heads: int, dim: int) -> PagedStream:
            pages = np.full((num_blocks, heads * BLOCK_SIZE * dim * size), 0xFF, np.uint8)  # NaN
            return PagedStream(pages, 0, dtype, heads, BLOCK_SIZE, dim)

        if layer.latent is not None:
            return LayerCache(stream(1, layer.latent.latent_dim + layer.latent.rope_dim), None, 0)
        heads = layer.num_kv_heads
        return LayerCache(stream(heads, layer.key_dim), stream(heads, layer.value_dim), 0)

    def _state_cache(self, layer: LayerConfig, dtype: str) -> LayerCache:
        """States in small pages, whose borders their parts cross; zeros before the first token."""
        parts, offset = [], 0
        for name, shape in state_shapes(layer, self.hidden_size):
            part = StatePart(name, shape, dtype)
            parts.append(StateOffset(0, part, offset, part.num_bytes))
            offset += part.num_bytes
        num_pages = -(-offset // PAGE_BYTES)
        self.num_state_pages = max(self.num_state_pages, num_pages)
        pages = np.zeros((1 + len(self.tables) * num_pages, PAGE_BYTES), np.uint8)
        return LayerCache.of_state(1, pages, tuple(parts))

    def state_batch(self, rows: Sequence[tuple[int, int, int]]) -> AttendBatch:
        """The same step for layers with a state: a sequence's entry instead of its blocks."""
        batch, count = self.batch(rows), self.num_state_pages
        entries = [1 + np.arange(count) * len(self.tables) + seq for seq, _, _ in rows]
        batch.block_tables = np.array(entries, np.int32).reshape(len(rows), count)
        return batch

    def batch(self, rows: Sequence[tuple[int, int, int]]) -> AttendBatch:
        """For (sequence, first position, length) of each part."""
        positions = np.concatenate([np.arange(s, s + n, dtype=np.int32) for _, s, n in rows])
        width = max(len(self.tables[seq]) for seq, _, _ in rows)
        tables = np.zeros((len(rows), width), np.int32)
        for row, (seq, _, _) in enumerate(rows):
            tables[row, : len(self.tables[seq])] = self.tables[seq]
        sequence = np.repeat(np.arange(len(rows)), [n for _, _, n in rows])
        blocks = tables[sequence, positions // BLOCK_SIZE].astype(np.int64)
        return AttendBatch(
            np.cumsum([0, *(n for _, _, n in rows)]).astype(np.int32),
            np.array([s + n for _, s, n in rows], np.int32),
            tables,
            positions,
            blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        )

    def forget_unreachable(self, seq: int, num_tokens: int) -> None:
        """Overwrite the blocks that no later query of the sequence may see."""
        for layer, cache in zip(self.layers, self.cache, strict=True):
            end = 0
            if layer.window is not None:
                end = max(0, num_tokens - layer.window + 1)
            if layer.chunk is not None:
                end = num_tokens // layer.chunk * layer.chunk
            for stream in (cache.keys, cache.values):
                if stream is not None:
                    stream.pages[self.tables[seq][: end // BLOCK_SIZE]] = 0xFF


def run(
    decoder: Decoder,
    sequences: Sequence[np.ndarray],
    schedule: Schedule,
    regimes: Sequence[int] = (),
) -> list[np.ndarray]:
    """Logits of every position of every sequence, computed step by step over one paged cache.

    ``regimes``: the rotary regime of each sequence, where the model has several.
    """
    pool = Pool(decoder, [len(ids) for ids in sequences])
    largest = max(sum(n for _, n in step) for step in schedule)
    workspace = Workspace(decoder.config, largest)
    done = [0] * len(sequences)
    rows: list[list[np.ndarray]] = [[] for _ in sequences]
    for step in schedule:
        parts = [(seq, done[seq], n) for seq, n in step]
        tokens = np.concatenate([sequences[seq][start : start + n] for seq, start, n in parts])
        batches = [pool.batch(parts), pool.state_batch(parts)]
        for batch in batches:
            if regimes:
                counts = [n for _, _, n in parts]
                batch.regimes = np.repeat([regimes[seq] for seq, _ in step], counts).astype(
                    np.int32
                )
        hidden, _ = decoder.forward(tokens, batches, pool.cache, workspace)
        logits = np.empty((len(tokens), decoder.config.vocab_size), np.float32)
        decoder.logits(hidden, logits)
        first = 0
        for seq, start, n in parts:
            rows[seq].append(logits[first : first + n])
            done[seq] = start + n
            first += n
            pool.forget_unreachable(seq, done[seq])
    return [np.concatenate(part) for part in rows]


def alone(*chunks: int) -> Schedule:
    """One sequence in chunks."""
    return [[(0, n)] for n in chunks]


def assert_agrees(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Every logit within `TOLERANCE` of its row's logit range."""
    spread = theirs.max(-1, keepdims=True) - theirs.min(-1, keepdims=True)
    error = np.abs(ours - theirs) / spread
    worst = np.unravel_index(np.argmax(error), error.shape)
    assert error.max() < TOLERANCE, f"position {worst[0]}: {error.max():.1e} of the logit range"


def borders(decoder: Decoder) -> list[int]:
    """Lengths around every window, chunk and block border: w-1, w, w+1, 2w+3."""
    sizes = {BLOCK_SIZE}
    for layer in decoder.config.layers:
        sizes |= {size for size in (layer.window, layer.chunk) if size is not None}
    return sorted({n for w in sizes for n in (w - 1, w, w + 1, 2 * w + 3)})


def check_exactness(
    decoder: Decoder, theirs_of: Callable[[np.ndarray], np.ndarray], seed: int = 5
) -> None:
    """The whole of it: full passes, chunks, one by one, and batches of unequal neighbours.

    Raises:
        AssertionError: logits that disagree, or bits that differ on a row-invariant backend.
    """
    lengths = borders(decoder)
    longest = max(24, lengths[-1])
    rng = np.random.default_rng(seed)
    vocab = decoder.config.vocab_size
    ids = rng.integers(0, vocab, longest).astype(np.int32)
    theirs = theirs_of(ids)
    results = [run(decoder, [ids[:n]], alone(n))[0] for n in (*lengths, longest)]
    for chunks in ([1] * longest, _chunks(longest, (7, 1, 3)), _chunks(longest, (BLOCK_SIZE + 1,))):
        results += run(decoder, [ids], alone(*chunks))
    results.append(_with_neighbours(decoder, ids, rng, theirs_of))
    for ours in results:
        assert_agrees(ours, theirs[: len(ours)])
    if decoder.backend.row_invariant:
        whole = results[len(lengths)]
        for ours in results:
            assert np.array_equal(ours, whole[: len(ours)])


def _chunks(total: int, sizes: Sequence[int]) -> list[int]:
    chunks: list[int] = []
    while sum(chunks) < total:
        chunks.append(min(sizes[len(chunks) % len(sizes)], total - sum(chunks)))
    return chunks


def _with_neighbours(
    decoder: Decoder, ids: np.ndarray, rng: Any, theirs_of: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """The sequence decoded between a shorter and a longer one that join and leave midway."""
    vocab, n = decoder.config.vocab_size, len(ids)
    short, long = (rng.integers(0, vocab, size).astype(np.int32) for size in (5, n + 3))
    half = n // 2
    schedule: Schedule = [
        [(0, 3), (2, half)],
        [(1, half), (0, 1), (2, 1)],
        [(2, 1), (1, 1), (0, 1)],
    ]
    schedule += [[(1, 1), (2, 1)]] * (n - half - 3)
    schedule += [[(2, n + 3 - (half + 2 + n - half - 3)), (1, 2)]]
    ours = run(decoder, [short, ids, long], schedule)
    assert_agrees(ours[0], theirs_of(short))
    assert_agrees(ours[2], theirs_of(long))
    return ours[1]
