"""SentencePiece vocabularies from GGUF metadata, against SentencePiece itself and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.text.golden import digest, golden
from tests.text.texts import LONG_TEXTS, TEXTS

from kvern.errors import FileFormatError
from kvern.spec.gguf import read_header
from kvern.text import Tokenizer

pytest.importorskip("sentencepiece", reason="the sentencepiece package is the oracle here")

from tests.text.sentencepiece_models import metadata, processor, train

BPE: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 900,
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "split_digits": True,
    },
    "no space prefix": {
        "vocab_size": 900,
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n", "\n\n", "<tag>", "<start_of_turn>"],
    },
    "whitespace removed": {"vocab_size": 700, "byte_fallback": True},
    "unknown token": {
        "vocab_size": 500,
        "character_coverage": 0.98,
        "remove_extra_whitespaces": False,
    },
}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
UNIGRAM: dict[str, dict[str, Any]] = {
    "t5": {"vocab_size": 700, "character_coverage": 0.98, **T5},
    "bytes": {
        "vocab_size": 900,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        **T5,
    },
}


def bpe(name: str) -> tuple[Tokenizer, Any]:
    model = train(model_type="bpe", normalization_rule_name="identity", **_options(BPE[name]))
    return Tokenizer.from_gguf(metadata(model, "llama")), processor(model)


def unigram(name: str) -> tuple[Tokenizer, Any]:
    model = train(model_type="unigram", **_options(UNIGRAM[name]))
    return Tokenizer.from_gguf(metadata(model, "t5")), processor(model)


def _options(options: dict[str, Any]) -> dict[str, Any]:
    symbols = options.get("user_defined_symbols")
    return {**options, **({"user_defined_symbols": ",".join(symbols)} if symbols else {})}


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def assert_equal_up_to_ties(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    """SentencePiece adds scores in single precision: of equal segmentations it takes any."""
    ids, expected = plain(tokenizer, text), oracle.encode(text)
    if ids != expected:
        assert oracle.decode(ids) == oracle.decode(expected)
        scores = [sum(map(oracle.get_score, some)) for some in (ids, expected)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4), text[:60]


@pytest.mark.parametrize("name", BPE)
def test_bpe_equals_sentencepiece(name: str) -> None:
    tokenizer, oracle = bpe(name)
    for text in (*TEXTS, *LONG_TEXTS.values()):
        text = text.replace("\x00", "")  # ends a text in the oracle's C strings
        assert plain(tokenizer, text) == oracle.encode(text), text[:60]


@pytest.mark.parametrize("name", UNIGRAM)
def test_unigram_equals_sentencepiece(name: str) -> None:
    tokenizer, oracle = unigram(name)
    for text in (*TEXTS, *LONG_TEXTS.values()):
        assert_equal_up_to_ties(tokenizer, oracle, text.replace("\x00", ""))


@given(st.text(alphabet=st.characters(exclude_characters="\x00", exclude_categories=["Cs"])))
@example("ａ\u0301 ①\u3000½")
def test_any_text_equals_sentencepiece(text: str) -> None:
    tokenizer, oracle = bpe("llama")
    assert plain(tokenizer, text) == oracle.encode(text)
    for name in UNIGRAM:
        assert_equal_up_to_ties(*unigram(name), text)


@given(st.text(alphabet=st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
def test_byte_fallback_loses_nothing(text: str) -> None:
    for name in ("llama", "no space prefix"):
        tokenizer, _ = bpe(name)
        assert tokenizer.decode(plain(tokenizer, text)) == text


def test_decoding_equals_sentencepiece() -> None:
    for name in ("llama", "no space prefix"):
        tokenizer, oracle = bpe(name)
        for text in TEXTS:
            ids = plain(tokenizer, text.replace("\x00", ""))
            assert tokenizer.decode(ids) == oracle.decode(ids)


def test_llama_rules_where_the_file_says_nothing() -> None:
    model = train(model_type="bpe", normalization_rule_name="identity", **BPE["llama"])
    entries = metadata(model, "llama")
    for key in ("add_space_prefix", "bos_token_id", "eos_token_id", "unknown_token_id"):
        del entries[f"tokenizer.ggml.{key}"]
    del entries["tokenizer.ggml.remove_extra_whitespaces"]
    tokenizer = Tokenizer.from_gguf(entries)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, True)
    assert not tokenizer.add_eos
    assert tokenizer.eos_ids == {2}
    assert tokenizer.token_text(tokenizer.encode("hello")[1]).startswith(" ")


def test_t5_rules_where_the_file_says_nothing() -> None:
    model = train(model_type="unigram", **UNIGRAM["t5"])
    tokenizer = Tokenizer.from_gguf(metadata(model, "t5"))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 1)
    assert (tokenizer.add_bos, tokenizer.add_eos) == (False, True)
    ids = tokenizer.encode("hello world")
    assert ids[-1] == 1
    assert tokenizer.encode("hello world</s>") == ids
    assert tokenizer.decode(ids) == "hello world"


def test_space_prefix_returns_behind_special_tokens() -> None:
    tokenizer, _ = bpe("llama")
    hello = plain(tokenizer, "hello")
    assert tokenizer.encode("<s>hello</s>hello") == [1, *hello, 2, *hello]


def test_special_text_is_plain_text_unless_asked_for() -> None:
    tokenizer, oracle = bpe("llama")
    for text in ("<s>", "a</s>b", "<unk>", "<0x41>"):
        ids = plain(tokenizer, text)
        assert ids == oracle.encode(text)
        assert tokenizer.decode(ids) == text
        assert not any(map(tokenizer.is_special, ids))
    assert tokenizer.encode("a</s>b")[2] == 2


def test_user_defined_tokens_are_always_found() -> None:
    tokenizer, _ = bpe("no space prefix")
    tag = plain(tokenizer, "<tag>")
    assert len(tag) == 1
    assert plain(tokenizer, "a<tag>b") == [
        *plain(tokenizer, "a"),
        *tag,
        *plain(tokenizer, "b"),
    ]
    assert tokenizer.decode(tag) == "<tag>"


def test_bos_is_added_once_and_never_removed() -> None:  # TOK-003
    tokenizer, _ = bpe("llama")
    hello = plain(tokenizer, "hello")
    assert tokenizer.encode("hello") == tokenizer.encode("<s>hello") == [1, *hello]
    assert tokenizer.encode("<s><s>hello") == [1, 1, *hello]


def test_pieces_of_equal_score_merge_from_the_left() -> None:
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "ba"]
    entries = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -3.0, -1.0, -1.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1],
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = Tokenizer.from_gguf(entries)
    assert plain(tokenizer, "babab") == [6, 6, 4]
    assert plain(tokenizer, "abaab") == [5, 3, 5]
    assert plain(tokenizer, "a??b?") == [3, 0, 4, 0]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"scores": None}, "needs tokenizer.ggml.scores"),
        ("llama", {"scores": [0.0]}, r"scores has 1 values for"),
        ("t5", {"scores": None}, "needs scores"),
        ("t5", {"precompiled_charsmap": [1, 2]}, "charsmap is damaged"),
        ("t5", {"precompiled_charsmap": [200, 0, 0, 0, 1, 2]}, "charsmap is damaged"),
        ("t5", {"token_type": [3] * 2_000}, "without a single normal piece"),
    ],
)
def test_damaged_vocabularies_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    options = UNIGRAM["t5"] if kind == "t5" else BPE["whitespace removed"]
    model_type = "unigram" if kind == "t5" else "bpe"
    rule = {} if kind == "t5" else {"normalization_rule_name": "identity"}
    entries = metadata(train(model_type=model_type, **options, **rule), kind)
    entries.update({f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    with pytest.raises(FileFormatError, match=message):
        Tokenizer.from_gguf({key: value for key, value in entries.items() if value is not None})


@pytest.mark.full
def test_gemma3_gives_llama_cpps_ids(gemma3_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(read_header(gemma3_path))
    data = golden()["gemma3-270m"]
    tag = plain(tokenizer, "</s>")
    assert len(tag) == 1  # struck-out text in Gemma; llama.cpp takes it for an end of sequence
    for text, expected, special in zip(TEXTS, data["plain"], data["special"], strict=True):
        assert tokenizer.encode(text) == special, text
        if "</s>" not in text:
            assert plain(tokenizer, text) == expected, text
            if "\u2581" not in text:
                assert tokenizer.decode(expected) == text
    for (name, text), expected in zip(LONG_TEXTS.items(), data["long"], strict=True):
        ids = plain(tokenizer, text)
        assert [len(ids), digest(ids)] == expected, name
    assert tokenizer.eos_ids == {1, 106}
    assert tokenizer.add_bos
