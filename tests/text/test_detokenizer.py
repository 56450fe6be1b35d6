"""Text one token at a time: the same as all at once, and never a broken character."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.golden import byte_level_metadata
from tests.text.texts import TEXTS

from kvern.text import Detokenizer, Tokenizer

ACCENTS_AND_EMOJI = "žluťoučký kůň 👋🏽 👨‍👩‍👧 東京タワー é"


@cache
def byte_level() -> Tokenizer:
    metadata = byte_level_metadata("smollm")
    # Few merges: most characters beyond ASCII are spread over several tokens.
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:200]
    return Tokenizer.from_gguf(metadata)


@cache
def byte_fallback() -> Tokenizer:
    letters = "\u2581abcdefghilorwuyťkůňž"
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces = [*letters, "\u2581h", "he", "\u2581he"]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens + pieces,
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        }
    )


TOKENIZERS = {"byte-level": byte_level, "byte fallback": byte_fallback}


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or ())
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_characters_over_several_tokens(name: str) -> None:  # TOK-001
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(ACCENTS_AND_EMOJI, add_special_tokens=False)
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids) == ACCENTS_AND_EMOJI
    assert "" in deltas
    shown = ""
    for delta in deltas:
        shown += delta
        assert ACCENTS_AND_EMOJI.startswith(shown)
        assert "\ufffd" not in delta


@pytest.mark.parametrize("name", TOKENIZERS)
def test_cut_in_the_middle_of_a_character(name: str) -> None:  # TOK-001
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode("👋", add_special_tokens=False)[:-1]
    *deltas, rest = stream(tokenizer, ids)
    assert "\ufffd" not in "".join(deltas)
    assert rest == "\ufffd"
    assert "".join(deltas) + rest == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_tokens(name: str) -> None:  # TOK-001
    tokenizer = TOKENIZERS[name]()
    choose = random.Random(5)
    for _ in range(200):
        ids = [choose.randrange(tokenizer.vocab_size + 2) for _ in range(choose.randrange(12))]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 255), max_size=16))
def test_random_bytes(values: list[int]) -> None:  # TOK-001
    tokenizer = byte_fallback()
    ids = [3 + value for value in values]
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == bytes(values).decode(errors="replace") == tokenizer.decode(ids)


def test_every_test_text() -> None:
    for make in TOKENIZERS.values():
        tokenizer = make()
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_leading_space_goes_at_the_start_of_a_text_only() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("he he", add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == "he he"
    assert "".join(stream(tokenizer, ids, prompt=[1])) == "he he"
    assert "".join(stream(tokenizer, ids, prompt=[1, *ids])) == " he he"
    assert "".join(stream(tokenizer, [259, *ids])) == " he he"


def test_prompt_that_ends_inside_a_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("say 👋 to")
    cut = len(tokenizer.encode("say 👋")) - 1
    prompt, rest = ids[:cut], ids[cut:]
    assert tokenizer.decode(prompt).endswith("\ufffd")
    assert "".join(stream(tokenizer, rest, prompt)) == "👋 to"


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("hi<|im_end|>")
    assert "".join(stream(tokenizer, ids)) == "hi"
    showing = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join([*map(showing.push, ids), showing.finish()]) == "hi<|im_end|>"
    # A special token between the bytes of a character does not break it.
    first, second = tokenizer.encode("é")
    assert "".join(stream(tokenizer, [first, 2, second])) == "é"
