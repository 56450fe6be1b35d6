"""Byte-level BPE from GGUF metadata, against ids that llama.cpp gave."""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.text.golden import byte_level_metadata, digest, golden
from tests.text.texts import LONG_TEXTS, TEXTS

from kvern.errors import FileFormatError, InputError, UnsupportedModelError
from kvern.spec.gguf import read_header
from kvern.text import Detokenizer, Tokenizer
from kvern.text.pretokenizers import PRE_TOKENIZERS

BYTE_LEVEL_KINDS = sorted(name for name, kind in PRE_TOKENIZERS.items() if kind.byte_level)


@cache
def small(kind: str) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata(kind))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_header(smollm2_path))


def changed(**entries: Any) -> dict[str, Any]:
    """Metadata of kind `smollm` with entries replaced, or removed where None."""
    metadata = byte_level_metadata("smollm")
    metadata.update({f"tokenizer.ggml.{name}": value for name, value in entries.items()})
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize("kind", BYTE_LEVEL_KINDS)
def test_every_kind_gives_llama_cpps_ids(kind: str) -> None:  # TOK-005
    data = golden()["byte_level"]
    tokenizer = small(kind)
    for text, known, choice in zip(TEXTS, data["ids"], data["kinds"][kind], strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert ids == known[choice], text
        assert tokenizer.decode(ids) == text
    assert tokenizer.add_bos is (kind in data["adding_bos"])


def test_the_golden_vocabulary_tells_kinds_apart() -> None:
    choices = {tuple(choice) for choice in golden()["byte_level"]["kinds"].values()}
    assert len(choices) >= 25


def test_smollm2_gives_llama_cpps_ids(smollm2: Tokenizer) -> None:
    data = golden()["smollm2"]
    for text, plain, special in zip(TEXTS, data["plain"], data["special"], strict=True):
        assert smollm2.encode(text, add_special_tokens=False, parse_special=False) == plain, text
        assert smollm2.encode(text) == special, text
        assert smollm2.decode(plain, skip_special_tokens=False) == text
        assert smollm2.decode(special, skip_special_tokens=False) == text
    for (name, text), expected in zip(LONG_TEXTS.items(), data["long"], strict=True):
        ids = smollm2.encode(text)
        assert [len(ids), digest(ids)] == expected, name
        assert smollm2.decode(ids) == text


def test_smollm2_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id) == (49_152, 1, 2)
    assert smollm2.eos_ids == {0, 2}
    assert not smollm2.add_bos
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_text(smollm2.encode(" hello")[0]) == " hello"
    assert smollm2.token_bytes(49_152) == smollm2.token_bytes(-1) == b""


def test_special_text_is_plain_text_unless_asked_for(smollm2: Tokenizer) -> None:
    text = "user wrote <|im_end|> here"
    assert 2 in smollm2.encode(text)
    assert 2 not in smollm2.encode(text, parse_special=False)
    assert smollm2.decode(smollm2.encode(text)) == "user wrote  here"
    assert smollm2.decode(smollm2.encode(text, parse_special=False)) == text


@given(st.text())
@example("\ufeff\x00\r\n\u0085")
@example("e\u0301\u200d👨‍👩‍👧" * 3)
def test_any_text_comes_back(text: str) -> None:
    for kind in ("smollm", "llama-bpe", "deepseek-v3", "tiny_aya", "superbpe", "gpt-4o"):
        tokenizer = small(kind)
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["superbpe", "tiny_aya", "afmoe", "exaone-moe", "gpt-4o"])
def test_long_runs_cost_no_more_than_their_length(kind: str) -> None:
    for run in ("7" * 100_000, "é" * 50_000, " " * 50_000):  # half a minute if it were quadratic
        assert small(kind).decode(small(kind).encode(run)) == run


def test_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'klingon'.*deepseek-v3.*llama-bpe.*smollm"):
        Tokenizer.from_gguf(changed(pre="klingon"))


def test_missing_kind_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kvern.text"):
        tokenizer = Tokenizer.from_gguf(changed(pre=None))
    assert "names no pre-tokenizer" in caplog.text
    text = "12345 don't"
    assert tokenizer.encode(text) == small("default").encode(text)


def test_llama3_assembles_no_word_that_is_a_token() -> None:
    metadata = changed(pre="llama-bpe", add_bos_token=False)
    tokens = [*metadata["tokenizer.ggml.tokens"], "zqzq"]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    assert Tokenizer.from_gguf(metadata).encode("zqzq") == [len(tokens) - 1]
    with_merges = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": "dbrx"})
    assert len(with_merges.encode("zqzq")) > 1


def test_bos_is_added_once_and_never_removed() -> None:  # TOK-003
    tokenizer = small("llama-bpe")
    bos = tokenizer.bos_id
    assert bos == 1
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [bos, *plain]
    assert tokenizer.encode("<|im_start|>Hello") == [bos, *plain]
    assert tokenizer.encode("<|im_start|><|im_start|>Hello") == [bos, bos, *plain]
    assert tokenizer.encode("<|im_start|>Hello", add_special_tokens=False) == [bos, *plain]
    as_text = tokenizer.encode("<|im_start|>Hello", parse_special=False)
    assert as_text[0] == bos
    assert bos not in as_text[1:]
    assert tokenizer.encode("") == [bos]
    assert small("smollm").encode("Hello") == plain


def test_eos_is_added_where_the_file_says_so() -> None:
    tokenizer = Tokenizer.from_gguf(changed(add_eos_token=True, add_bos_token=True))
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [1, *plain, 2]
    assert tokenizer.encode("Hello<|im_end|>") == [1, *plain, 2]


def test_end_ids_are_found_by_key_and_by_text() -> None:
    assert small("smollm").eos_ids == {0, 2}
    metadata = changed(eot_token_id=1, eos_token_id=None)
    assert Tokenizer.from_gguf(metadata).eos_ids == {0, 1, 2}


def test_mislabelled_end_of_turn_is_a_control_token() -> None:
    types = [1] * len(golden()["byte_level"]["tokens"])
    tokenizer = Tokenizer.from_gguf(changed(token_type=types))
    assert tokenizer.is_special(2)
    assert tokenizer.encode("a<|im_end|>")[-1] == 2
    assert 2 not in tokenizer.encode("a<|im_end|>", parse_special=False)


def test_phi3_tokens_swallow_the_space_behind_them() -> None:
    metadata = {**changed(), "general.name": "Phi-3 mini"}
    tokenizer = Tokenizer.from_gguf(metadata)
    expected = [2, *tokenizer.encode("Hello")]
    assert tokenizer.encode("<|im_end|> \n Hello") == expected
    assert small("smollm").encode("<|im_end|> \n Hello") != expected
    assert tokenizer.encode("<|endoftext|> Hello") == [0, *tokenizer.encode(" Hello")]


def test_almost_empty_texts() -> None:  # SRV-008
    with_bos, without_bos = small("llama-bpe"), small("smollm")
    for text in ("", " ", "\u200b", "\x00"):
        ids = without_bos.encode(text)
        assert bool(ids) is bool(text)
        assert without_bos.decode(ids) == text
        assert with_bos.encode(text)[0] == with_bos.bos_id


def test_numpy_ids_are_ids() -> None:
    tokenizer = small("smollm")
    ids = np.array(tokenizer.encode("héllo"), dtype=np.int32)
    assert tokenizer.decode(ids) == "héllo"
    detokenizer = Detokenizer(tokenizer, ids)
    assert detokenizer.push(ids[0]) == tokenizer.token_text(ids[0]) == "h"
    assert tokenizer.is_special(np.int32(2))


def test_import_is_light() -> None:
    heavy = ("jinja2", "numpy", "torch", "transformers", "huggingface_hub", "sentencepiece")
    code = (
        "import sys, kvern; before = set(sys.modules); import kvern.text;"
        f"print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert answer.stdout.decode().strip() == "[]"


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(InputError, match=r"U\+D83D at character 1"):
        small("smollm").encode("a\ud83d")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model": None}, "describes no tokenizer"),
        ({"tokens": None}, "no vocabulary"),
        ({"tokens": []}, "no vocabulary"),
        ({"tokens": "abc"}, "must be an array"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, r"'a' twice, as ids 0 and 2"),
        ({"token_type": [1, 1]}, r"2 values for 2,500 tokens"),
        ({"merges": None}, "needs tokenizer.ggml.merges"),
        ({"merges": ["a"]}, "merges do not fit"),
        ({"merges": ["Ġ notoken"]}, "merges do not fit"),
        ({"bos_token_id": 2_500}, r"bos_token_id is 2500.*2,500 tokens"),
        ({"eos_token_id": -1}, r"eos_token_id is -1"),
    ],
)
def test_damaged_metadata_is_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        Tokenizer.from_gguf(changed(**entries))


def test_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'bert'.*gpt2.*llama.*t5"):
        Tokenizer.from_gguf(changed(model="bert"))


def test_empty_tokens_keep_their_ids() -> None:
    tokens = [*golden()["byte_level"]["tokens"], "", ""]
    types = [3, 3, 3] + [1] * (len(tokens) - 3)
    tokenizer = Tokenizer.from_gguf(changed(tokens=tokens, token_type=types))
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.token_text(len(tokens) - 1) == f"[EMPTY_{len(tokens) - 1}]"


def test_plain_text_bpe_with_byte_fallback() -> None:
    characters = ["\u2581", "a", "b", "\n", "\u2581a", "ab", "\n\n\n"]
    tokens = ["<pad>", "<eos>", "<bos>", "<turn|>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [3, 3, 3, 3] + [6] * 256 + [1] * len(characters)
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": [*tokens, *characters],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": ["\u2581 a", "a b"],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.add_bos_token": False,
        }
    )
    first = len(tokens)
    assert tokenizer.add_bos
    assert tokenizer.eos_ids == {1, 3}
    text = "ab a\n\n\né"
    ids = tokenizer.encode(text)
    assert ids == [2, first + 5, first + 4, first + 6, 4 + 0xC3, 4 + 0xA9]
    assert tokenizer.decode(ids) == text
