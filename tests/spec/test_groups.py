"""Pages, groups and the plan: nothing overlaps, nothing is lost, every byte is accounted for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spec import samples

from kvern.errors import CapacityError, UsageError
from kvern.spec import (
    KV_FORMATS,
    All,
    Chunk,
    Heads,
    Index,
    KVCacheSpec,
    Last,
    Latent,
    State,
    StatePart,
    Window,
    layer_offsets,
    make_kv_groups,
    make_kv_plan,
)
from kvern.spec.pages import KVGroup, state_offsets

MIB = 2**20

reaches = st.sampled_from([All(), Window(128), Window(1024, sinks=4), Chunk(256)])
token_contents = st.one_of(
    st.builds(Heads, st.sampled_from([1, 2, 3, 8]), st.sampled_from([64, 96, 192]), st.just(64)),
    st.just(Latent(512, 64)),
    st.just(Index(128)),
)
token_caches = st.builds(KVCacheSpec, token_contents, reaches, st.sampled_from([1, 1, 1, 4, 128]))
state_caches = st.builds(
    lambda n: KVCacheSpec(State((StatePart("recurrent", (n, 16, 16), "fp32"),)), Last()),
    st.integers(1, 40),
)
layers_of_caches = st.lists(
    st.one_of(token_caches, state_caches, st.tuples(token_caches, token_caches)),
    min_size=1,
    max_size=12,
)
formats = st.sampled_from(list(KV_FORMATS))
block_sizes = st.sampled_from([32, 64, 96])


def test_smollm2_page_is_exactly_what_the_spec_says() -> None:
    plan = make_kv_plan(samples.smollm2(), "bf16", 16, 64 * MIB)
    [group] = plan.groups
    assert group.page_bytes == 368_640
    assert group.layers == tuple(range(30))
    assert group.padding_bytes == 0
    assert plan.num_blocks == 64 * MIB // 368_640
    assert plan.total_bytes + plan.waste == 64 * MIB


def test_gemma3_270m_splits_into_six_groups_of_three_layers() -> None:
    groups = make_kv_groups(samples.gemma3_270m().layers, 16)
    assert [len(group.layers) for group in groups] == [3] * 6
    assert {group.page_bytes for group in groups} == {3 * 16 * 1024}
    assert sum(group.padding_bytes for group in groups) == 0
    assert [group.layers for group in groups if group.spec.reach == All()] == [(5, 11, 17)]


def test_unlike_bytes_per_layer_take_more_tokens_per_block() -> None:
    full, window = samples.heads(2, 512), samples.heads(8, 256, Window(1024))
    groups = make_kv_groups(samples.model_of(*([window] * 5 + [full]) * 5).layers, 16)
    assert {(group.block_size, len(group.layers)) for group in groups} == {(16, 5), (32, 5)}
    assert sum(group.padding_bytes for group in groups) == 0


def test_layers_of_one_reach_share_a_page_whatever_their_bytes() -> None:
    """Sparse-attention layers with an index key beside plain ones: one table, no padding."""
    plain, sparse = samples.heads(4, 128), (samples.heads(4, 128), KVCacheSpec(Index(128), All()))
    [group] = make_kv_groups(samples.model_of(*[plain] * 3, *[sparse] * 57).layers, 16)
    assert group.page_bytes == 16 * (60 * 2048 + 57 * 256)
    assert group.padding_bytes == 0
    assert [len(streams) for streams in layer_offsets(group).values()] == [2] * 3 + [3] * 57


def test_a_state_entry_takes_whole_pages() -> None:
    plan = make_kv_plan(samples.qwen3_next(), "bf16", 16, 1024 * MIB)
    attention, state = plan.groups
    assert (attention.pages_per_entry, attention.is_state) == (1, False)
    assert state.used_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert state.pages_per_entry == -(-state.used_bytes // plan.page_bytes)
    assert 0 <= state.padding_bytes < plan.page_bytes


def test_a_shared_layer_costs_nothing_and_lies_in_no_group() -> None:
    own = samples.heads(2, 64)
    shared = KVCacheSpec(own.content, own.reach, share_with=0)
    model = samples.model_of(own, shared)
    assert model.layers[1].bytes_per_token == 0
    plan = make_kv_plan(model, "bf16", 16, num_blocks=8)
    assert [group.layers for group in plan.groups] == [(0,)]
    assert plan.groups_of_layer(0) == plan.groups
    assert plan.groups_of_layer(1) == ()


def test_narrow_formats_account_for_open_blocks() -> None:
    plan = make_kv_plan(samples.smollm2(), "kivi2", 32, 64 * MIB, max_num_seqs=8)
    [group] = plan.groups
    assert group.page_bytes * 16 == group.open_page_bytes * 3  # 3 bits against bf16
    assert plan.open_bytes == 8 * 32 * 23_040
    assert plan.pool_bytes + plan.open_bytes + plan.waste == 64 * MIB
    [streams] = {len(streams) for streams in layer_offsets(group, open_form=True).values()}
    assert streams == 2
    wide = make_kv_plan(samples.smollm2(), "fp32", 32, 64 * MIB, max_num_seqs=8)
    assert (wide.open_bytes, wide.num_open_blocks) == (0, 0)


@given(layers_of_caches, formats, block_sizes)
def test_streams_never_overlap_and_sum_to_the_spec(caches, kv_format: str, block_size: int) -> None:
    model = samples.model_of(*caches).with_kv_format(kv_format)
    for group in make_kv_groups(model.layers, block_size):
        offsets = state_offsets(group) if group.is_state else layer_offsets(group)
        pieces = sorted((s.offset, s.num_bytes) for streams in offsets.values() for s in streams)
        position = 0
        for offset, num_bytes in pieces:
            assert offset == position
            position += num_bytes
        assert position == group.used_bytes <= group.page_bytes * group.pages_per_entry
        if not group.is_state:
            expected = sum(
                cache.block_bytes(group.block_size)
                for layer in group.layers
                for cache in model.layers[layer].caches
                if cache.reach == group.spec.reach and not cache.is_state
            )
            assert position == expected


@given(layers_of_caches, formats, block_sizes)
def test_every_cache_lies_in_exactly_one_group(caches, kv_format: str, block_size: int) -> None:
    model = samples.model_of(*caches).with_kv_format(kv_format)
    groups = make_kv_groups(model.layers, block_size)
    assert len({group.page_bytes for group in groups}) == 1
    placed = [
        (layer, cache)
        for group in groups
        for layer, layer_caches in zip(group.layers, group.caches, strict=True)
        for cache in layer_caches
    ]
    owned = [(layer.index, cache) for layer in model.layers for cache in layer.caches]
    assert sorted(placed, key=repr) == sorted(owned, key=repr)
    # Conservation: used and padding together are the pages, to the byte.
    for group in groups:
        pages = group.page_bytes * group.pages_per_entry
        assert group.used_bytes + group.padding_bytes == pages
        assert group.padding_bytes >= 0
        assert group.block_size % block_size == 0
        stored = sum(
            cache.fixed_bytes + cache.block_bytes(group.block_size)
            for layer_caches in group.caches
            for cache in layer_caches
        )
        assert stored == group.used_bytes


@given(
    st.integers(1, 300), st.integers(1, 40), st.sampled_from([1, 4, 16, 32]),
    st.one_of(reaches, st.builds(Window, st.integers(1, 40), st.integers(0, 5)),
              st.builds(Chunk, st.integers(1, 40))),
)  # fmt: skip
def test_pages_for_bounds_what_a_sequence_holds(
    num_tokens: int, num_scheduled: int, block_size: int, reach
) -> None:
    """Simulate a sequence step by step: blocks that are live or being written."""
    group = KVGroup((0,), samples.heads(1, 64, reach), block_size, 1)
    most, computed = 0, 0
    while computed < num_tokens:
        scheduled = min(num_scheduled, num_tokens - computed)
        spans = (*reach.live(computed), (computed, computed + scheduled))
        held = {p // block_size for start, stop in spans for p in range(start, stop)}
        most = max(most, len(held))
        computed += scheduled
    assert most <= group.pages_for(num_tokens, num_scheduled)
    assert group.pages_for(num_tokens, num_scheduled) <= -(-num_tokens // block_size)


def test_a_pool_that_holds_nothing_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        CapacityError, match=r"holds 1 blocks of 368,640 bytes.*give at least 737,280"
    ):
        make_kv_plan(samples.smollm2(), "bf16", 16, 500_000)
    assert make_kv_plan(samples.smollm2(), "bf16", 16, 737_280).num_blocks == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_format": "bf16", "block_size": 16}, "kv_memory or num_blocks"),
        ({"kv_format": "bf16", "block_size": 0, "num_blocks": 9}, "must be positive"),
        ({"kv_format": "bf16", "block_size": 16, "num_blocks": 1}, "block 0 is the null block"),
        ({"kv_format": "kivi2", "block_size": 16, "num_blocks": 9}, "a multiple of 32"),
    ],
)
def test_impossible_plans_are_refused(arguments, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_kv_plan(samples.smollm2(), **arguments)


def test_both_limits_together() -> None:
    plan = make_kv_plan(samples.smollm2(), "bf16", 16, 10 * MIB, num_blocks=5)
    assert plan.num_blocks == 5
    assert plan.pool_bytes + plan.waste == 10 * MIB
    with pytest.raises(CapacityError, match="100 are needed"):
        make_kv_plan(samples.smollm2(), "bf16", 16, 10 * MIB, num_blocks=100)
