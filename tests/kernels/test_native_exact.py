"""Bit-identity: no row depends on other rows, threads, chunking, block size or placement."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvern.kernels.native import ELEMENT_TYPES, NativeBackend
from kvern.kernels.protocol import AttendParams

from .native_cases import PATHS, STREAM_DTYPES, Shape, attend, build_cache, random_tensor

pytestmark = pytest.mark.usefixtures("require_native")

LIMITS = {
    "all": AttendParams(scale=0.125),
    "window": AttendParams(scale=0.125, window=100, num_sink_tokens=3),
    "chunk": AttendParams(scale=0.125, chunk=96),
    "sink_logits": AttendParams(
        scale=0.125, softcap=4.0, sink_logits=np.linspace(-1, 1, 9, dtype=np.float32)
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("element_type", "weights_format"),
    [*((t, f) for f in ("auto", "fp32") for t in ELEMENT_TYPES), ("Q6_K", "bf16"), ("F32", "bf16")],
)
def test_a_product_row_stands_alone(path: str, element_type: str, weights_format: str) -> None:
    tensor = random_tensor(element_type, 100, 512)
    x = np.random.default_rng(2).standard_normal((512, 512)).astype(np.float32)
    whole = np.empty((512, 100), np.float32)
    backends = {threads: NativeBackend(threads, path) for threads in (1, 2, 3, 8)}
    weights = {threads: b.prepare([tensor], weights_format) for threads, b in backends.items()}
    backends[2].matmul(x, weights[2], whole)
    for threads, num_rows, start in (
        (1, 1, 0),
        (2, 1, 511),
        (1, 2, 7),
        (3, 7, 100),
        (8, 64, 300),
        (8, 1, 37),
        (3, 5, 9),
    ):
        out = np.empty((num_rows, 100), np.float32)
        backends[threads].matmul(x[start : start + num_rows], weights[threads], out)
        assert out.tobytes() == whole[start : start + num_rows].tobytes(), (threads, num_rows)
    for threads in (1, 3, 8):
        out = np.empty((512, 100), np.float32)
        backends[threads].matmul(x, weights[threads], out)
        assert out.tobytes() == whole.tobytes(), threads


@pytest.mark.parametrize("path", PATHS)
def test_a_product_in_bf16_stands_alone_whatever_its_columns(path: str) -> None:
    """Neither whole pairs nor whole tiles of features; groups of rows left over."""
    for cols, rows in ((19, 1), (33, 50), (95, 120), (64, 17)):
        tensor = random_tensor("F32", rows, cols)
        x = np.random.default_rng(cols).standard_normal((90, cols)).astype(np.float32)
        whole = np.empty((90, rows), np.float32)
        NativeBackend(2, path).matmul(x, NativeBackend(2, path).prepare([tensor], "bf16"), whole)
        for threads in (1, 3):
            backend = NativeBackend(threads, path)
            weight = backend.prepare([tensor], "bf16")
            for start, stop in ((0, 90), (0, 1), (7, 24), (5, 38), (89, 90)):
                out = np.empty((stop - start, rows), np.float32)
                backend.matmul(x[start:stop], weight, out)
                assert out.tobytes() == whole[start:stop].tobytes(), (cols, threads, start)


def chunked(backend: NativeBackend, shape: Shape, borders: list[int]) -> np.ndarray:
    """The sequence's rows computed chunk by chunk, each chunk seeing what lies before it."""
    cache = build_cache(backend, dataclasses.replace(shape, q_lengths=shape.lengths))
    outs = []
    for start, stop in zip([0, *borders], [*borders, shape.lengths[0]], strict=True):
        batch = dataclasses.replace(
            cache.batch,
            cu_seqlens_q=np.array([0, stop - start], np.int32),
            seq_lens=np.array([stop], np.int32),
            positions=np.arange(start, stop, dtype=np.int32),
        )
        out = np.empty((stop - start, shape.heads, shape.value_dim), np.float32)
        backend.attend(cache.q[start:stop], cache.keys, cache.values, batch, shape.params, out)
        outs.append(out)
    return np.concatenate(outs)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", list(STREAM_DTYPES))
@pytest.mark.parametrize("limits", list(LIMITS))
def test_attention_does_not_see_how_it_is_carried_out(path: str, dtype: str, limits: str) -> None:
    shape = Shape(lengths=(333,), q_lengths=(333,), dtype=dtype, params=LIMITS[limits])
    two = NativeBackend(2, path)
    whole = attend(two, shape)
    for threads in (1, 3, 8):
        assert attend(NativeBackend(threads, path), shape).tobytes() == whole.tobytes(), threads
    for block_size in (1, 4, 32):
        other = dataclasses.replace(shape, block_size=block_size, placement=block_size)
        assert attend(two, other).tobytes() == whole.tobytes(), block_size
    for borders in (list(range(1, 333, 41)), list(range(16, 333, 16)), [64, 65, 128, 300, 332]):
        assert chunked(two, shape, borders).tobytes() == whole.tobytes(), borders


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", list(STREAM_DTYPES))
@pytest.mark.parametrize("key_dim", [64, 80, 256])
def test_decoding_equals_the_prompt_pass(path: str, dtype: str, key_dim: int) -> None:
    shape = Shape(
        lengths=(290,),
        q_lengths=(290,),
        key_dim=key_dim,
        value_dim=key_dim,
        dtype=dtype,
        heads=4,
        kv_heads=2,
    )
    backend = NativeBackend(2, path)
    whole = attend(backend, shape)
    one_by_one = chunked(backend, shape, list(range(1, 290)))
    assert one_by_one.tobytes() == whole.tobytes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("limits", list(LIMITS))
def test_neighbours_and_splits_change_nothing(path: str, limits: str) -> None:
    """Many lone queries over long contexts are split over units; a big batch of them is not."""
    params = LIMITS[limits]
    lengths = (1030, 5, 700, 64, 257)
    alone = [
        attend(NativeBackend(8, path), Shape(lengths=(n,), q_lengths=(min(2, n),), params=params))
        for n in lengths
    ]
    together = Shape(
        lengths=lengths, q_lengths=tuple(min(2, n) for n in lengths), params=params, placement=4
    )
    for threads in (1, 2, 8):
        assert (
            attend(NativeBackend(threads, path), together).tobytes()
            == np.concatenate(alone).tobytes()
        )
    backwards = dataclasses.replace(
        together, lengths=lengths[::-1], q_lengths=together.q_lengths[::-1]
    )
    assert (
        attend(NativeBackend(2, path), backwards).tobytes() == np.concatenate(alone[::-1]).tobytes()
    )


@pytest.mark.parametrize("path", PATHS)
def test_row_operations_stand_alone(path: str) -> None:
    one, many = NativeBackend(1, path), NativeBackend(3, path)
    rng = np.random.default_rng(8)
    x = rng.standard_normal((300, 1152)).astype(np.float32)
    weight = rng.standard_normal(1152).astype(np.float32)
    whole = np.empty_like(x)
    many.rms_norm(x, weight, 1e-5, whole)
    for i in (0, 17, 299):
        out = np.empty((1, 1152), np.float32)
        one.rms_norm(x[i : i + 1], weight, 1e-5, out)
        assert out.tobytes() == whole[i : i + 1].tobytes()
    for kind in ("silu", "gelu", "gelu_tanh"):
        gated = np.empty((300, 576), np.float32)
        many.gated_activation(x, kind, gated)
        out = np.empty((1, 576), np.float32)
        one.gated_activation(x[5:6], kind, out)
        assert out.tobytes() == gated[5:6].tobytes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", list(STREAM_DTYPES))
@pytest.mark.parametrize("block_size", [16, 48])
def test_a_shared_prefix_walked_together_changes_nothing(
    path: str, dtype: str, block_size: int
) -> None:
    """Sequences whose tables name the same first blocks are computed as one there.

    0, 2 and 4 share 1,008 tokens, 0 and 4 some more; 1 has nothing in common with them; 3 shares
    too, but has a whole chunk of new tokens.
    """
    lengths = (1700, 900, 1100, 1300, 1650)
    shape = Shape(
        lengths=lengths, q_lengths=(1, 1, 2, 70, 3), dtype=dtype, block_size=block_size, placement=3
    )
    cache = build_cache(NativeBackend(1, path), shape)
    tables = cache.batch.block_tables
    for sequence, shared in ((2, 1008), (3, 1008), (4, 1536)):
        tables[sequence, : shared // block_size] = tables[0, : shared // block_size]
    starts = cache.batch.cu_seqlens_q
    alone = []
    backend = NativeBackend(2, path)
    for s in range(len(lengths)):
        batch = dataclasses.replace(
            cache.batch,
            cu_seqlens_q=np.array([0, shape.q_lengths[s]], np.int32),
            seq_lens=cache.batch.seq_lens[s : s + 1],
            block_tables=tables[s : s + 1],
        )
        out = np.empty((shape.q_lengths[s], 9, 64), np.float32)
        q = cache.q[starts[s] : starts[s + 1]]
        backend.attend(q, cache.keys, cache.values, batch, shape.params, out)
        alone.append(out)
    for threads in (1, 2, 8):
        out = np.empty((len(cache.q), 9, 64), np.float32)
        NativeBackend(threads, path).attend(
            cache.q, cache.keys, cache.values, cache.batch, shape.params, out
        )
        assert out.tobytes() == np.concatenate(alone).tobytes(), threads
