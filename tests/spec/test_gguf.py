"""The GGUF header reader: agreement with the gguf package, and nothing trusted."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spec.gguf_bytes import ARRAY, GGUF, STRING, U32, Tensor, sample, string

from kvern.errors import FileFormatError, ModelError
from kvern.spec.gguf import GGML_TYPES, is_gguf, read_header

SAMPLE = sample().to_bytes()


@pytest.fixture
def write(tmp_path: Path):
    def write_file(content: GGUF | bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content.to_bytes() if isinstance(content, GGUF) else content)
        return path

    return write_file


def test_reads_everything_of_a_small_file(write) -> None:
    header = read_header(write(sample()))
    metadata = header.metadata
    assert header.version == 3
    assert header.architecture == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["some.big"] == 2**63 + 1
    assert metadata["tokenizer.ggml.tokens"].to_list() == ["<s>", "", "é", "日本", "\n"]
    assert list(metadata["tokenizer.ggml.token_type"]) == [3, 1, -1, 1, 6]
    assert metadata["some.flags"][:] == [True, False]
    assert [list(array) for array in metadata["some.nested"]] == [[1, 2], ["a"], []]
    assert len(metadata["tokenizer.ggml.tokens"]) == 5
    info = header.tensors["output.weight"]
    assert (info.type, info.shape, info.offset, info.nbytes) == ("Q4_0", (2, 64), 224, 72)
    assert header.num_parameters == 32 * 5 + 4 + 64 * 2
    assert header.data_offset % 32 == 0
    assert SAMPLE[header.data_offset :] == sample().data
    assert is_gguf(header.path)


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_uint32("gemma3.block_count", 18)
    writer.add_float64("a.double", 0.1)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(1000)])
    writer.add_array("a.numbers", [0.5, 0.25])
    writer.add_tensor("a", np.arange(96, dtype=np.float32).reshape(3, 32))
    writer.add_tensor("b", np.zeros((2, 3, 4), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs, ours = gguf.GGUFReader(path), read_header(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            content = ours.metadata[key]
            assert field.contents() == (content.to_list() if hasattr(content, "raw") else content)
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert ours.data_offset + info.offset == tensor.data_offset
        assert (info.type, info.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert list(info.shape) == list(reversed([int(n) for n in tensor.shape]))


def test_type_table_agrees_with_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    for number, (name, elements, num_bytes) in GGML_TYPES.items():
        kind = constants.GGMLQuantizationType(number)
        assert kind.name == name
        assert constants.GGML_QUANT_SIZES[kind] == (elements, num_bytes)


def test_default_model_header_is_what_it_is(smollm2_path: Path) -> None:
    header = read_header(smollm2_path)
    assert header.num_parameters == 134_515_008
    assert len(header.tensors) == 272
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert (len(tokens), tokens[0]) == (49_152, "<|endoftext|>")


@given(st.integers(0, len(SAMPLE) - 1))
def test_every_truncation_is_refused(tmp_path_factory, length: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    path.write_bytes(SAMPLE[:length])
    with pytest.raises(FileFormatError):
        read_header(path)


@given(st.integers(0, len(SAMPLE) - len(sample().data) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_read_but_never_crashes(
    tmp_path_factory, position: int, change: int
) -> None:
    damaged = bytearray(SAMPLE)
    damaged[position] ^= change
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(FileFormatError):
        header = read_header(path)
        for content in header.metadata.values():
            list(content) if hasattr(content, "raw") else content
        data_bytes = len(damaged) - header.data_offset
        assert all(i.offset + i.nbytes <= data_bytes for i in header.tensors.values())


@given(st.integers(0, len(SAMPLE) - 9), st.sampled_from([2**31, 2**32 - 1, 2**63, 2**64 - 1]))
def test_absurd_lengths_are_refused_at_once(tmp_path_factory, position: int, length: int) -> None:
    damaged = bytearray(SAMPLE)
    damaged[position : position + 8] = struct.pack("<Q", length)
    path = tmp_path_factory.mktemp("absurd") / "absurd.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(FileFormatError):
        read_header(path)


def changed(**changes) -> GGUF:
    content = sample()
    for name, new in changes.items():
        setattr(content, name, new)
    return content


Q8_0_TENSOR = Tensor("a", (32, 4), 8, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with b''"),
        (b"PK\3\4" + SAMPLE[4:], "not a GGUF file"),
        (changed(version=1), "version 1 is not supported: 2 and 3 are"),
        (changed(version=3 << 24), "big-endian"),
        (changed(num_tensors=2**40), "tensors cannot lie in"),
        (changed(num_metadata=2**60), "metadata entries cannot lie in"),
        (GGUF(metadata=[("a", U32, 1), ("a", U32, 1)]), "metadata key a appears twice"),
        (GGUF(metadata=[("", U32, 1)]), "metadata key at byte 24 has 0 characters"),
        (GGUF(metadata=[("general.alignment", U32, 12)]), "multiple of 8"),
        (GGUF(metadata=[("general.alignment", U32, 0)]), "multiple of 8"),
        (GGUF(tensors=[Q8_0_TENSOR, Q8_0_TENSOR], data=b"\0" * 136), "tensor a appears twice"),
        (GGUF(tensors=[Tensor("a", (32, 4), 77, 0)], data=b"\0" * 136), "unknown type 77"),
        (GGUF(tensors=[Tensor("a", (33, 4), 8, 0)], data=b"\0" * 136), "no whole number of Q8_0"),
        (GGUF(tensors=[Tensor("a", (32,) * 5, 0, 0)]), "5 dimensions: 1 to 4"),
        (GGUF(tensors=[Tensor("a", (), 0, 0)]), "0 dimensions"),
        (GGUF(tensors=[Tensor("a", (0, 4), 0, 0)]), "impossible shape"),
        (GGUF(tensors=[Tensor("a", (2**40, 2**40), 0, 0)]), "impossible shape"),
        (GGUF(tensors=[Tensor("a", (32, 4), 8, 7)], data=b"\0" * 200), "not aligned to 32"),
        (GGUF(tensors=[Q8_0_TENSOR], data=b"\0" * 135), "needs 136 bytes.*truncated"),
        (GGUF(tensors=[Tensor("a", (4,), 0, 2**40)]), "truncated"),
        (
            GGUF(tensors=[Q8_0_TENSOR, Tensor("b", (4,), 0, 128)], data=b"\0" * 200),
            "tensors a and b overlap",
        ),
    ],
)  # fmt: skip
def test_damage_is_named(write, content, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_header(write(content))


def raw_entry(kind: int, body: bytes) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    return head + string("key") + struct.pack("<I", kind) + body


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (raw_entry(13, b"\0" * 8), "metadata type 13"),
        (raw_entry(7, b"\2"), "boolean"),
        (raw_entry(STRING, struct.pack("<Q", 2**62)), "a metadata string"),
        (raw_entry(STRING, string(b"\xff\xfe")), "not UTF-8"),
        (raw_entry(ARRAY, struct.pack("<IQ", 13, 1)), "array type 13"),
        (raw_entry(ARRAY, struct.pack("<IQ", U32, 2**61)), "numbers cannot lie"),
        (raw_entry(ARRAY, struct.pack("<IQ", STRING, 2**61)), "strings cannot lie"),
        (raw_entry(ARRAY, struct.pack("<IQQ", STRING, 1, 2**64 - 1)), "runs past the file's end"),
        (raw_entry(ARRAY, struct.pack("<IQ", ARRAY, 1) * 9), "nested more than 4 deep"),
    ],
)  # fmt: skip
def test_damaged_metadata_is_named(write, content: bytes, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_header(write(content))


def test_strings_are_checked_when_they_are_decoded(write) -> None:
    body = struct.pack("<IQ", STRING, 2) + string("a") + string(b"\xff")
    header = read_header(write(raw_entry(ARRAY, body)))
    with pytest.raises(FileFormatError, match="string 1 of a metadata array is not UTF-8"):
        header.metadata["key"].to_list()


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*: No such file"):
        read_header(tmp_path / "none.gguf")


def test_a_file_without_architecture_says_so(write) -> None:
    with pytest.raises(FileFormatError, match=r"general\.architecture is missing"):
        _ = read_header(write(GGUF())).architecture
