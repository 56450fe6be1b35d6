"""Finding the tokens that are taken out of a text before it is tokenised."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

_WHITESPACE: Final = " \t\n\v\f\r"


class TokenMatcher:
    """Cuts a text at the texts of given tokens.

    Longer tokens are found first, anywhere in the text, then shorter ones in what is left; equal
    tokens from left to right. Only tokens that occur cost anything beyond one scan.

    Args:
        tokens: token id by text.
        strip_after: ids of tokens that swallow the whitespace behind them.
    """

    def __init__(self, tokens: Mapping[str, int], strip_after: Iterable[int] = ()) -> None:
        self._ids = dict(tokens)
        self._strip_after = frozenset(strip_after)
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes) for first, sizes in lengths.items()}
        firsts = "".join(map(re.escape, self._lengths))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str) -> list[str | int]:
        """The text as a list of plain pieces (never empty) and token ids, in order."""
        pieces: list[str | int] = [text] if text else []
        for token in self._present(text):
            pieces = self._cut(pieces, token, self._ids[token])
        return pieces

    def _present(self, text: str) -> list[str]:
        if self._first is None:
            return []
        found = set()
        for match in self._first.finditer(text):
            start = match.start()
            for length in self._lengths[text[start]]:
                candidate = text[start : start + length]
                if candidate in self._ids:
                    found.add(candidate)
        return sorted(found, key=lambda token: (-len(token.encode()), self._ids[token]))

    def _cut(self, pieces: list[str | int], token: str, token_id: int) -> list[str | int]:
        result: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                result.append(piece)
                continue
            first, *others = piece.split(token)
            if first:
                result.append(first)
            for other in others:
                result.append(token_id)
                rest = other.lstrip(_WHITESPACE) if token_id in self._strip_after else other
                if rest:
                    result.append(rest)
        return result
