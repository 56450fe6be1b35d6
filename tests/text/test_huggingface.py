"""Hugging Face folders, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.text.hf_folders import SHAPES, llama2, write_folder
from tests.text.texts import LONG_TEXTS, TEXTS
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from kvern.errors import FileFormatError, InputError, ModelError
from kvern.spec.gguf import read_header
from kvern.text import Detokenizer, Tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hi there, 42 times!  "},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {shape: write_folder(root / shape, shape) for shape in SHAPES}


def oracle_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def without_double_bos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """What kvern promises: transformers' ids, less the BOS or EOS it adds beside another."""
    if tokenizer.add_bos and ids[:2] == [tokenizer.bos_id] * 2:
        ids = ids[1:]
    if tokenizer.add_eos and ids[-2:] == [tokenizer.eos_id] * 2:
        ids = ids[:-1]
    return ids


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_equal_transformers(shape: str, folders: dict[str, Path]) -> None:
    tokenizer, oracle = Tokenizer.from_file(folders[shape]), oracle_of(folders[shape])
    special = ["<|im_end|> x", "<think>a</think>", "<tool> <|extra|><|pad|>", "a</s>b<s>c"]
    for text in (*TEXTS, *LONG_TEXTS.values(), *special):
        expected = oracle(text)["input_ids"]
        assert tokenizer.encode(text) == without_double_bos(expected, tokenizer), text[:60]
        expected = oracle(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text[:60]
        expected = oracle(text, split_special_tokens=True)["input_ids"]
        assert tokenizer.encode(text, parse_special=False) == expected, text[:60]


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_equal_transformers(shape: str, folders: dict[str, Path]) -> None:
    tokenizer, oracle = Tokenizer.from_file(folders[shape]), oracle_of(folders[shape])
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for skip in (False, True):
            expected = oracle.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
            deltas = [*map(detokenizer.push, ids), detokenizer.finish()]
            assert "".join(deltas) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_named_tokens_equal_transformers(shape: str, folders: dict[str, Path]) -> None:
    tokenizer, oracle = Tokenizer.from_file(folders[shape]), oracle_of(folders[shape])
    assert tokenizer.bos_id == oracle.bos_token_id
    assert tokenizer.eos_id == oracle.eos_token_id
    assert tokenizer.eos_ids == {oracle.eos_token_id}
    assert tokenizer.vocab_size == len(oracle)
    for token_id in oracle.added_tokens_decoder:
        is_left_out = oracle.decode([token_id], skip_special_tokens=True) == ""
        assert tokenizer.is_special(token_id) == is_left_out
    framed = oracle("a")["input_ids"]
    assert tokenizer.add_bos == (framed[0] == oracle.bos_token_id)
    assert tokenizer.add_eos == (framed[-1] == oracle.eos_token_id)


@pytest.mark.parametrize("shape", SHAPES)
def test_chats_equal_transformers(shape: str, folders: dict[str, Path]) -> None:  # TOK-003
    tokenizer, oracle = Tokenizer.from_file(folders[shape]), oracle_of(folders[shape])
    for add in (False, True):
        expected = oracle.apply_chat_template(MESSAGES, add_generation_prompt=add)["input_ids"]
        ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=add)
        assert ids == expected
        if tokenizer.bos_id is not None:
            assert ids[0] == tokenizer.bos_id
            assert tokenizer.bos_id not in ids[1:]


def test_chat_template_without_bos_gets_none(tmp_path: Path) -> None:  # TOK-003
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    folder = write_folder(tmp_path, "llama3", chat_template=template)
    tokenizer, oracle = Tokenizer.from_file(folder), oracle_of(folder)
    ids = tokenizer.apply_chat_template(MESSAGES)
    assert ids == oracle.apply_chat_template(MESSAGES)["input_ids"]
    assert tokenizer.bos_id not in ids


def test_raw_text_that_begins_with_bos(folders: dict[str, Path]) -> None:  # TOK-003
    tokenizer, oracle = Tokenizer.from_file(folders["llama3"]), oracle_of(folders["llama3"])
    text = "<|im_start|>Hello"
    assert oracle(text)["input_ids"][:2] == [1, 1]
    assert tokenizer.encode(text) == oracle(text)["input_ids"][1:]
    assert tokenizer.encode("<|im_start|>" + text) == oracle(text)["input_ids"]


def test_digits_that_transformers_reads_without_pre(smollm2_path: Path) -> None:
    """transformers knows no `smollm` pre-tokenizer; it takes the file for a GPT-2 tokenizer.

    The two differ wherever more than a space stands before a digit: GPT-2 keeps the last of the
    spaces for the number, SmolLM cuts digits out first, and so did its own tokenizer in training.
    """
    tokenizer = Tokenizer.from_gguf(read_header(smollm2_path))
    oracle = transformers.AutoTokenizer.from_pretrained(
        str(smollm2_path.parent), gguf_file=smollm2_path.name
    )
    different = [text for text in TEXTS if tokenizer.encode(text) != oracle(text)["input_ids"]]
    assert different
    for text in different:
        assert any(character.isnumeric() for character in text), text
    assert "a  b   c    d     e" not in different
    show = tokenizer.token_text
    assert [show(i) for i in tokenizer.encode("x  12")] == ["x", "  ", "1", "2"]
    assert [show(i) for i in oracle("x  12")["input_ids"]] == ["x", " ", " ", "1", "2"]


def test_generation_configuration_names_the_end(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama3")
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_file(folder).eos_ids == {2, 7}
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    assert Tokenizer.from_file(folder).eos_ids == {0, 2, 5}


def test_templates_in_files_and_by_name(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T{{ tools | length }}"},
    ]
    tokenizer = Tokenizer.from_file(write_folder(tmp_path, "llama3", chat_template=named))
    assert tokenizer.chat_template == "D{{ messages[0].content }}"
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "Dx"
    assert tokenizer.render_chat([{"role": "user", "content": "x"}], tools=[{}, {}]) == "T2"
    assert tokenizer.render_chat(MESSAGES, chat_template="tool_use", tools=[{}]) == "T1"
    assert tokenizer.render_chat(MESSAGES, chat_template="own {{ 1 + 1 }}") == "own 2"
    with pytest.raises(InputError, match="no chat template 'rag': it has default, tool_use"):
        tokenizer.render_chat(MESSAGES, chat_template="rag")
    (tmp_path / "chat_template.jinja").write_text("F")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer.chat_template == "F"
    assert tokenizer.render_chat(MESSAGES, chat_template="rag") == "R"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "byte_level")
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    raw.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_file(folder).encode("one two three four five")) > 4


def test_file_without_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    llama2().save(str(path))
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.bos_id is None
    assert tokenizer.chat_template is None
    ids = tokenizer.encode("hello")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "hello"
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def test_broken_byte_tokens_become_one_mark_per_broken_character(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    llama2().save(str(path))
    tokenizer = Tokenizer.from_file(path)
    ids = [3 + byte for byte in "é".encode() + b"\xe4\xbd"]
    assert tokenizer.decode(ids) == "é\ufffd"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder("</w>")])
def test_decoders_that_need_the_whole_text(tmp_path: Path, decoder: Any) -> None:
    words = ["[UNK]", "hello", "world", "##s", "!", "a</w>", "b</w>"]
    raw = RawTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        raw.decoder = decoder
    path = tmp_path / "tokenizer.json"
    raw.save(str(path))
    tokenizer = Tokenizer.from_file(path)
    assert not tokenizer.has_token_bytes
    ids = [1, 2, 3, 4, 5, 6, 1]
    detokenizer = Detokenizer(tokenizer)
    deltas = [*map(detokenizer.push, ids), detokenizer.finish()]
    assert "".join(deltas) == tokenizer.decode(ids) == raw.decode(ids)
    behind = Detokenizer(tokenizer, ids[:2])
    deltas = [*map(behind.push, ids[2:]), behind.finish()]
    assert tokenizer.decode(ids[:2]) + "".join(deltas) == raw.decode(ids)


def test_ids_outside_the_vocabulary_have_no_text(folders: dict[str, Path]) -> None:
    for shape in ("byte_level", "llama2", "unigram"):
        tokenizer = Tokenizer.from_file(folders[shape])
        assert tokenizer.decode([tokenizer.vocab_size, -1, 10**6]) == ""


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no file or folder"):
        Tokenizer.from_file(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"tokenizer\.model but no tokenizer\.json"):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FileFormatError, match=r"not a valid tokenizer\.json"):
        Tokenizer.from_file(tmp_path)
    folder = write_folder(tmp_path / "good", "llama2")
    for content, message in (("{", "cannot be read as JSON"), ("[]", "must hold an object")):
        (folder / "tokenizer_config.json").write_text(content)
        with pytest.raises(FileFormatError, match=message):
            Tokenizer.from_file(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(FileFormatError, match="chat_template is int"):
        Tokenizer.from_file(folder)
