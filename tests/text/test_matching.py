"""Tokens that are taken out of a text before it is tokenised."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvern.text.matching import TokenMatcher


def test_longer_tokens_are_found_first_anywhere() -> None:
    matcher = TokenMatcher({"ab": 1, "bcd": 2, "\n": 3, "\n\n": 4, "<x>": 5})
    assert matcher.split("abcd") == ["a", 2]
    assert matcher.split("ab cd") == [1, " cd"]
    assert matcher.split("\n\n\n") == [4, 3]
    assert matcher.split("<x><x> <x") == [5, 5, " <x"]
    assert matcher.split("plain") == ["plain"]
    assert matcher.split("") == []


def test_no_tokens_at_all() -> None:
    assert TokenMatcher({}).split("text") == ["text"]


def test_whitespace_behind_a_token() -> None:
    matcher = TokenMatcher({"<a>": 1, "<b>": 2}, strip_after=[1])
    assert matcher.split("x <a> \n y <b> z <a>  ") == ["x ", 1, "y ", 2, " z ", 1]


def test_characters_that_mean_something_in_expressions() -> None:
    tokens = {"]": 1, "^": 2, "-": 3, "\\": 4, "[a": 5}
    assert TokenMatcher(tokens).split("x]^-\\[a") == ["x", 1, 2, 3, 4, 5]


@given(
    st.dictionaries(st.text("ab<", min_size=1, max_size=3), st.integers(0, 99), max_size=4),
    st.text("ab<c", max_size=20),
)
def test_pieces_make_the_text(tokens: dict[str, int], text: str) -> None:
    unique = {token: number for number, token in enumerate(tokens)}
    names = {number: token for token, number in unique.items()}
    pieces = TokenMatcher(unique).split(text)
    assert "".join(names[p] if isinstance(p, int) else p for p in pieces) == text
    for piece in pieces:
        if isinstance(piece, str):
            assert piece
            assert not any(token in piece for token in unique)
