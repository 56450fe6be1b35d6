"""The slab is what the plan says, and block operations move what they say and nothing else."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.kernels.batches import slots_batch

from kvern.core.plan import Copy, CopyOpen, Zero
from kvern.errors import UsageError
from kvern.kernels.reference import ReferenceBackend, gather
from kvern.kernels.reference_narrow import open_view
from kvern.spec.codec import KV_FORMATS, stored_formats
from kvern.spec.content import Heads
from kvern.spec.groups import KVPlan, make_kv_plan
from kvern.spec.layers import KVCacheSpec, LayerSpec, ModelSpec
from kvern.spec.reach import All, Window
from kvern.store.dtypes import decode, encode
from kvern.store.pool import PagedStore
from kvern.store.streams import PagedStream


def plan(kv_format: str = "bf16", num_blocks: int = 6) -> KVPlan:
    heads = Heads(2, 8, 4)
    layers = tuple(
        LayerSpec(i, "attention", (KVCacheSpec(heads, All() if i < 2 else Window(6)),))
        for i in range(4)
    )
    model = ModelSpec("toy", "Toy", "toy", 4, layers)
    return make_kv_plan(model, kv_format, 4, num_blocks=num_blocks)


def streams_of(store: PagedStore, layer: int) -> tuple[int, tuple[PagedStream, ...]]:
    found = store.streams(layer)
    assert found is not None
    return found


def test_the_slab_has_exactly_the_planned_bytes_and_starts_as_zeros() -> None:
    kv_plan = plan()
    store = PagedStore(kv_plan)
    assert store.nbytes == kv_plan.pool_bytes == 6 * 2 * 4 * (2 * 8 + 2 * 4) * 2
    assert not store.pages.any()


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "bf16"])
def test_every_slot_of_every_stream_is_its_own(kv_format: str) -> None:
    store = PagedStore(plan(kv_format))
    backend = ReferenceBackend()
    rng = np.random.default_rng(0)
    slots = np.arange(6 * 4, dtype=np.int64)
    written = {}
    for layer in range(4):
        group, streams = streams_of(store, layer)
        assert group == (0 if layer < 2 else 1)
        if group == 1:
            continue  # pages are shared by groups: fill one group's view of them
        for index, stream in enumerate(streams):
            x = rng.normal(size=(len(slots), stream.num_heads, stream.dim)).astype(np.float32)
            backend.append(x, stream, slots_batch(slots))
            written[layer, index] = decode(encode(x, kv_format), kv_format)
    for (layer, index), x in written.items():
        got = gather(streams_of(store, layer)[1][index], np.arange(6, dtype=np.int32), 24)
        np.testing.assert_array_equal(got, x.transpose(1, 0, 2))
    assert np.count_nonzero(store.pages) > 0.8 * store.nbytes  # nothing is left over


def test_copy_moves_the_first_tokens_of_every_layer_and_zero_clears() -> None:
    store = PagedStore(plan())
    store.pages[:] = np.random.default_rng(1).integers(1, 255, store.pages.shape, dtype=np.uint8)
    before = store.pages.copy()
    store.execute([Copy(src=2, dst=5, num_tokens=3, group=0), Zero(block=1, group=0)])
    assert not store.pages[1].any()
    for layer in (0, 1):
        for stream in streams_of(store, layer)[1]:
            block = np.array([5], np.int32)
            got = gather(stream, block, 4)
            np.testing.assert_array_equal(got[:, :3], gather(stream, np.array([2], np.int32), 3))
    store.pages[1] = before[1]
    changed = np.flatnonzero((store.pages != before).any(axis=1)).tolist()
    assert changed == [5]
    last_slot = [gather(s, np.array([5], np.int32), 4)[:, 3] for s in streams_of(store, 0)[1]]
    store.pages[:] = before
    kept = [gather(s, np.array([5], np.int32), 4)[:, 3] for s in streams_of(store, 0)[1]]
    for now, old in zip(last_slot, kept, strict=True):
        np.testing.assert_array_equal(now, old)


def test_formats_that_the_engine_cannot_store_are_refused_by_name() -> None:
    narrow = sorted(set(KV_FORMATS) - set(stored_formats()))
    assert narrow == ["fp8", "int4", "k8v4", "kivi2", "kivi4"]
    for name in narrow:
        heads = LayerSpec(0, "attention", (KVCacheSpec(Heads(1, 32, 32), All()),))
        model = ModelSpec("toy", "Toy", "toy", 1, (heads,))
        with pytest.raises(UsageError, match=r"not yet stored.*choose fp32, fp16, bf16, int8"):
            PagedStore(make_kv_plan(model, name, 32, num_blocks=2))


def narrow_store(kv_format: str) -> PagedStore:
    heads = Heads(2, 8, 4)
    layers = tuple(LayerSpec(i, "attention", (KVCacheSpec(heads, All()),)) for i in range(3))
    model = ModelSpec("toy", "Toy", "toy", 3, layers)
    return PagedStore(make_kv_plan(model, kv_format, 4, num_blocks=6, max_num_seqs=3), 10)


def test_open_pages_and_rows_hold_narrow_layers_alone() -> None:
    store = narrow_store("int8;1=fp16")
    (pages,) = store.open_pages
    assert pages.shape == (3, 2 * 2 * 4 * (8 + 4) * 2)
    assert sorted(rows.shape for rows in store.rows.values()) == [(10, 16), (10, 32)]
    assert store.open_bytes == store.plan.open_bytes == pages.nbytes
    assert store.row_bytes == store.plan.row_bytes(10) == 480
    streams = [streams_of(store, layer)[1] for layer in range(3)]
    assert [[s.open is not None for s in pair] for pair in streams] == [
        [True, True],
        [False, False],
        [True, True],
    ]
    first, last = streams[0][0].open, streams[2][0].open
    assert first is not None
    assert last is not None
    assert np.shares_memory(first.rows, last.rows)  # layers of one geometry take turns
    assert (first.offset, last.offset) == (0, 2 * 4 * (8 + 4) * 2)


def test_an_open_copy_moves_narrow_layers_and_a_copy_the_others() -> None:
    store = narrow_store("int8;1=fp16")
    rng = np.random.default_rng(2)
    for memory in (store.pages, *store.open_pages):
        memory[:] = rng.integers(1, 255, memory.shape, dtype=np.uint8)
    pages, (opened,) = store.pages.copy(), (store.open_pages[0].copy(),)
    store.execute([Copy(2, 5, 3, 0), CopyOpen(0, 2, 3, 0)])
    changed = np.flatnonzero((store.pages != pages).any(axis=1)).tolist()
    assert changed == [5]
    wide = streams_of(store, 1)[1]
    size = 2 * 4 * (8 + 4) * 2
    outside = np.r_[0 : wide[0].offset, wide[0].offset + size : store.pages.shape[1]]
    np.testing.assert_array_equal(store.pages[5, outside], pages[5, outside])
    view = store.open_pages[0].reshape(3, -1)
    assert np.flatnonzero((view != opened).any(axis=1)).tolist() == [2]
    for layer in (0, 2):
        for stream in streams_of(store, layer)[1]:
            got, old = open_view(stream), open_view(replace_open(stream, opened))
            np.testing.assert_array_equal(got[2, :, :3], old[0, :, :3])
            np.testing.assert_array_equal(got[2, :, 3:], old[2, :, 3:])
    store.execute([Copy(1, 4, 4, 0)])  # a whole block: sealed codes and all
    np.testing.assert_array_equal(store.pages[4], pages[1])


def replace_open(stream: PagedStream, pages: np.ndarray) -> PagedStream:
    assert stream.open is not None
    return replace(stream, open=replace(stream.open, pages=pages))


def test_a_layer_that_lends_its_cache_has_rows_of_its_own() -> None:
    own = KVCacheSpec(Heads(2, 8, 4), All())
    layers = (own, own, replace(own, share_with=0))
    model = ModelSpec(
        "toy", "Toy", "toy", 3, tuple(LayerSpec(i, "a", (cache,)) for i, cache in enumerate(layers))
    )
    store = PagedStore(make_kv_plan(model, "int8", 4, num_blocks=6), 10)
    lender, other = (streams_of(store, layer)[1][0].open for layer in (0, 1))
    assert lender is not None
    assert other is not None
    assert not np.shares_memory(lender.rows, other.rows)
    assert store.row_bytes == store.plan.row_bytes(10) == 2 * 480


@pytest.mark.skipif(sys.platform != "linux", reason="reads how Linux has mapped the slab")
def test_a_big_slab_is_private_memory_that_may_have_huge_pages() -> None:
    """Shared anonymous memory is a file of tmpfs, and most systems give those no huge pages."""
    pages = PagedStore(plan(num_blocks=20_000)).pages
    assert pages.nbytes > 4 << 20
    first = pages.ctypes.data
    assert first % (2 << 20) == 0
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(x, 16) for x in entry.split(" ", 1)[0].split("-"))
        if begin <= first < end:
            break
    assert entry.split()[1] == "rw-p", entry
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        flags = next(line for line in entry.splitlines() if line.startswith("VmFlags"))
        assert "hg" in flags.split(), entry
