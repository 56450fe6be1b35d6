"""The safetensors header reader: agreement with the package, and nothing trusted."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.errors import FileFormatError, ModelError
from kvern.spec.safetensors import read_folder, read_header


def file_bytes(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = {
    "__metadata__": {"format": "pt"},
    "a": entry("BF16", [2, 3], 0, 12),
    "b": entry("F32", [], 12, 16),
}
SAMPLE = file_bytes(GOOD, bytes(16))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_reads_a_small_file(path: Path) -> None:
    path.write_bytes(SAMPLE)
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    info = header.tensors["a"]
    assert (info.type, info.shape, info.offset, info.nbytes) == ("BF16", (2, 3), 0, 12)
    assert header.tensors["b"].num_elements == 1
    assert header.data_offset == len(SAMPLE) - 16


def test_agrees_with_the_safetensors_package(path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    np = pytest.importorskip("numpy")
    tensors = {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "h": np.ones((5,), dtype=np.float16),
        "i": np.arange(3, dtype=np.int64),
    }
    library.save_file(tensors, path)
    header, raw = read_header(path), path.read_bytes()
    for name, tensor in tensors.items():
        info = header.tensors[name]
        start = header.data_offset + info.offset
        assert info.shape == tensor.shape
        assert raw[start : start + info.nbytes] == tensor.tobytes()


@given(st.integers(0, len(SAMPLE) - 1))
def test_every_truncation_is_refused(tmp_path_factory, length: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    path.write_bytes(SAMPLE[:length])
    with pytest.raises(FileFormatError):
        read_header(path)


@given(st.integers(0, len(SAMPLE) - 17), st.integers(1, 255))
def test_a_changed_byte_never_crashes(tmp_path_factory, position: int, change: int) -> None:
    damaged = bytearray(SAMPLE)
    damaged[position] ^= change
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    path.write_bytes(damaged)
    with contextlib.suppress(FileFormatError):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1234567", "too few"),
        (struct.pack("<Q", 2**60) + b"{}", "truncated or no safetensors"),
        (file_bytes(b"[1]", b""), "a list, not an object"),
        (file_bytes(b"{", b""), "not valid JSON"),
        (file_bytes(b"[" * 100_000, b""), "not valid JSON"),
        (file_bytes(b'{"a": 1, "a": 2}', b""), "'a' appears twice"),
        (file_bytes({"a": 1}, b""), "lacks a dtype"),
        (file_bytes({"a": {"dtype": "F32", "shape": [1]}}, b""), "lacks a dtype"),
        (file_bytes({"a": entry("F33", [1], 0, 4)}, bytes(4)), "unknown dtype 'F33'"),
        (file_bytes({"a": entry(["F32"], [1], 0, 4)}, bytes(4)), "unknown dtype"),
        (file_bytes({"a": entry("F32", [-1], 0, 4)}, bytes(4)), "impossible shape"),
        (file_bytes({"a": entry("F32", [True], 0, 4)}, bytes(4)), "impossible shape"),
        (file_bytes({"a": entry("F32", [2], 0, 4)}, bytes(4)), "takes 8 bytes.*span 4"),
        (file_bytes({"a": entry("F32", [2], 0, 8)}, bytes(4)), "truncated"),
        (
            file_bytes({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, bytes(8)),
            "tensors a and b overlap|tensors b and a overlap",
        ),
        (file_bytes({"a": entry("F32", [1], 0, 4)}, bytes(5)), "cover 4 of 5 bytes"),
        (file_bytes({"__metadata__": {"a": 1}}, b""), "table of strings"),
    ],
)
def test_damage_is_named(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=message):
        read_header(path)


def write_shards(folder: Path, weight_map: dict[str, object]) -> None:
    (folder / "one.safetensors").write_bytes(file_bytes({"a": entry("F32", [1], 0, 4)}, bytes(4)))
    (folder / "two.safetensors").write_bytes(file_bytes({"b": entry("F16", [4], 0, 8)}, bytes(8)))
    index = {"metadata": {"total_size": 12}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    index = read_folder(tmp_path)
    assert [file.path.name for file in index.files] == ["one.safetensors", "two.safetensors"]
    assert index.header_of["b"].path.name == "two.safetensors"
    assert index.num_parameters == 5


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(SAMPLE)
    assert set(read_folder(tmp_path).header_of) == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "error", "message"),
    [
        ({}, FileFormatError, "missing or empty"),
        ({"a": "../one.safetensors"}, FileFormatError, "no file name"),
        ({"a": 7}, FileFormatError, "no file name"),
        ({"b": "one.safetensors"}, FileFormatError, "tensor b is not in one.safetensors"),
        ({"a": "three.safetensors"}, ModelError, "cannot read .*three.safetensors"),
    ],
)
def test_wrong_indexes_are_refused(tmp_path: Path, weight_map, error, message: str) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(error, match=message):
        read_folder(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds neither"):
        read_folder(tmp_path)
