"""Stop strings across the borders of tokens."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.text.golden import byte_level_metadata

from kvern.errors import InputError
from kvern.text import Detokenizer, StopStrings, Tokenizer


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    watcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        text, matched = watcher.push(piece)
        shown += text
        if matched is not None:
            assert watcher.push("more") == ("", matched)
            assert watcher.finish() == ""
            return shown, matched
    return shown + watcher.finish(), None


@pytest.mark.parametrize(  # SRV-005
    ("stops", "pieces", "shown", "matched"),
    [
        (["lue sky"], ["A clear b", "lue", " sky", "!"], "A clear b", "lue sky"),
        (["ABCABD"], ["ABC", "ABC", "ABD", "x"], "ABC", "ABCABD"),
        (["ABCABD"], list("ABCABCABD"), "ABC", "ABCABD"),
        (["STOP"], ["STOP", "x"], "", "STOP"),
        (["</think>"], ["done ", "</thin"], "done </thin", None),
        (["ab", "abc", "abcd", "x"], ["1ab", "cd"], "1", "ab"),
        (["sky", "blue sky"], ["a ", "blue", " sky"], "a ", "blue sky"),
        (["bcd", "c"], ["a", "bcd"], "ab", "c"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        ([], ["a", "b"], "ab", None),
        (["é"], ["caf", "é!"], "caf", "é"),
    ],
)
def test_known_cases(stops: list[str], pieces: list[str], shown: str, matched: str | None) -> None:
    assert run(stops, pieces) == (shown, matched)


def test_stop_over_byte_tokens() -> None:  # SRV-005
    metadata = byte_level_metadata("smollm")
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:1]
    tokenizer = Tokenizer.from_gguf(metadata)
    detokenizer, watcher = Detokenizer(tokenizer), StopStrings(["é"])
    ids = tokenizer.encode("café au lait")
    assert len(ids) > len("café au lait")
    shown = ""
    for token_id in ids:
        text, matched = watcher.push(detokenizer.push(token_id))
        shown += text
        if matched:
            break
    assert (shown, watcher.matched) == ("caf", "é")


def test_near_misses_are_held_back_only_while_they_may_match() -> None:
    watcher = StopStrings(["</s>"])
    assert watcher.push("a</") == ("a", None)
    assert watcher.push("b") == ("</b", None)
    assert watcher.push("<") == ("", None)
    assert watcher.finish() == "<"
    assert watcher.finish() == ""
    assert watcher.matched is None


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="stop string is empty"):
        StopStrings(["a", ""])


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.text("abc", max_size=20),
    st.lists(st.integers(1, 5), min_size=20, max_size=20),
)
@example(["aab"], "aaab", [1] * 20)
def test_pieces_do_not_matter(stops: list[str], text: str, sizes: list[int]) -> None:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if ends:
        _, start, matched = min(ends)
        assert run(stops, pieces) == (text[:start], matched)
    else:
        assert run(stops, pieces) == (text, None)
    assert run(stops, pieces) == run(stops, list(text)) == run(stops, [text])
