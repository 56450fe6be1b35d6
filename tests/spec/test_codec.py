"""Exact bytes of every stored form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.errors import UsageError
from kvern.spec.codec import KV_FORMATS, Codec, parse_kv_format
from kvern.spec.content import Heads, State, StatePart
from kvern.spec.layers import KVCacheSpec
from kvern.spec.reach import All, Last

TOKENS, HEADS, DIM = 128, 8, 128
ELEMENTS = TOKENS * HEADS * DIM


@pytest.mark.parametrize(
    ("name", "k_bits", "v_bits"),
    [
        ("fp32", 32, 32),
        ("fp16", 16, 16),
        ("bf16", 16, 16),
        ("fp8", 8, 8),  # plain fp8: no per-token scale
        ("int8", 8 + 32 / DIM, 8 + 32 / DIM),  # one fp32 scale per token and head
        ("int4", 5, 5),  # group 32: fp16 scale and minimum add 1 bit
        ("k8v4", 8 + 32 / DIM, 5),
        ("kivi4", 5, 5),
        ("kivi2", 3, 3),  # 3.0 bits per element, 5.33 times smaller than fp16
    ],
)
def test_bits_per_element_of_every_format(name: str, k_bits: float, v_bits: float) -> None:
    k_codec, v_codec = KV_FORMATS[name]
    assert k_codec.stored_bytes(TOKENS, HEADS, DIM) * 8 == k_bits * ELEMENTS
    assert v_codec.stored_bytes(TOKENS, HEADS, DIM) * 8 == v_bits * ELEMENTS


def test_every_format_is_covered_above() -> None:
    assert list(KV_FORMATS) == [
        "fp32", "fp16", "bf16", "fp8", "int8", "int4", "k8v4", "kivi4", "kivi2",
    ]  # fmt: skip


@pytest.mark.parametrize(("scale", "expected"), [("fp32", 68), ("fp16", 66), ("bf16", 66)])
def test_scale_dtype_of_int8_is_data(scale: str, expected: int) -> None:
    assert Codec("int8", scale=scale).stored_bytes(1, 1, 64) == expected


def test_zero_points_rotation_and_odd_dims() -> None:
    int8 = Codec("int8", scale="fp32")
    assert replace(int8, zero_point=True).stored_bytes(1, 1, 64) == 72
    assert replace(int8, rotate=True).stored_bytes(7, 3, 64) == int8.stored_bytes(7, 3, 64)
    assert Codec("int4").stored_bytes(1, 3, 5) == 3 * 3  # rows are packed to whole bytes
    assert Codec("int4", group=32, scale="fp16").stored_bytes(1, 1, 100) == 50 + 4 * 2


codecs = st.builds(
    Codec,
    dtype=st.sampled_from(["fp32", "bf16", "fp8_e4m3", "int8", "int4", "int2"]),
    group=st.sampled_from([8, 32, 64]),
    axis=st.sampled_from(["token", "channel"]),
    zero_point=st.booleans(),
    scale=st.sampled_from(["fp32", "fp16"]),
)


@given(codecs, st.integers(1, 4), st.integers(1, 8), st.sampled_from([64, 80, 96, 128, 576]))
def test_regions_follow_each_other_and_add_up(
    codec: Codec, num_groups: int, num_heads: int, dim: int
) -> None:
    num_tokens = num_groups * codec.token_group
    regions = codec.regions(num_tokens, num_heads, dim)
    position = 0
    for region in regions:
        assert region.offset == position
        position += region.num_bytes
    assert position == codec.stored_bytes(num_tokens, num_heads, dim)
    # Whole groups cost the same wherever they lie: bytes are proportional to tokens.
    assert position == num_groups * codec.stored_bytes(codec.token_group, num_heads, dim)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "int3"},
        {"dtype": "int8", "scale": "fp12"},
        {"dtype": "int8", "scale": "fp32", "axis": "diagonal"},
        {"dtype": "int2", "scale": "fp16", "axis": "channel"},
        {"dtype": "int2", "group": -1},
        {"dtype": "int8", "zero_point": True},
    ],
)
def test_impossible_codecs_are_refused(arguments) -> None:
    with pytest.raises(ValueError, match=r"unknown|possible|needs"):
        Codec(**arguments)


def test_format_mixes_name_layers() -> None:
    pairs = parse_kv_format("int8;0-1,4=bf16;1=kivi2", 5)
    names = [next(name for name, pair in KV_FORMATS.items() if pair == p) for p in pairs]
    assert names == ["bf16", "kivi2", "int8", "int8", "bf16"]


@pytest.mark.parametrize(
    ("kv_format", "message"),
    [
        ("int7", "unknown KV format 'int7': choose one of fp32"),
        ("int8;0-1", "LAYERS=NAME"),
        ("int8;0-9=bf16", "the model has 5"),
        ("int8;3-1=bf16", "do not exist"),
        ("int8;first=bf16", "not a layer number"),
    ],
)
def test_wrong_formats_are_refused(kv_format: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_kv_format(kv_format, 5)


def test_open_blocks_hold_narrow_streams_in_bf16_and_no_others() -> None:
    def open_of(k_codec: Codec, v_codec: Codec) -> list[tuple[str, str, int]]:
        spec = KVCacheSpec(Heads(2, 64, 32), All()).with_codecs(k_codec, v_codec)
        return [
            (stream.name, codec.dtype, regions[-1].offset + regions[-1].num_bytes)
            for stream, codec, regions in spec.open_regions(16)
        ]

    narrow, wide = KV_FORMATS["int8"][0], KV_FORMATS["fp32"][0]
    key, value = ("key", "bf16", 2 * 16 * 64 * 2), ("value", "bf16", 2 * 16 * 32 * 2)
    assert open_of(*KV_FORMATS["k8v4"]) == [key, value]
    assert open_of(wide, narrow) == [value]
    assert open_of(wide, wide) == []


def test_states_keep_their_dtypes_except_under_fp32() -> None:
    parts = (StatePart("conv", (8, 3), "bf16"), StatePart("recurrent", (2, 4, 4), "fp32"))
    spec = KVCacheSpec(State(parts), Last())
    assert spec.with_codecs(*KV_FORMATS["kivi2"]).fixed_bytes == 8 * 3 * 2 + 2 * 4 * 4 * 4
    assert spec.with_codecs(*KV_FORMATS["fp32"]).fixed_bytes == 8 * 3 * 4 + 2 * 4 * 4 * 4
