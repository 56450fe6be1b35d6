"""Every run of tokens from position 0, as one number: what a cached key and value must stand for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

UNWRITTEN = 0
ROOT, LONG_ROOT = 1, 2


class Contexts:
    """A trie of token runs. Node 0 is "nothing was written", nodes 1 and 2 are empty runs.

    Two slots hold exchangeable content exactly when they carry the same number: keys and values depend on
    all tokens up to their own, on the position regime, and on nothing else.
    """

    def __init__(self, border: int | None = None) -> None:
        """Args: border: tokens up to which a run is in the short position regime; None: there is one."""
        self._border = border
        self._children: dict[tuple[int, int], int] = {}
        self._parents = [UNWRITTEN] * 3
        self._tokens = [-1] * 3

    def regime(self, length: int) -> int:
        """The position regime of a run of ``length`` tokens."""
        return int(self._border is not None and length > self._border)

    def extend(self, node: int, tokens: Iterable[int]) -> I64:
        """Numbers of the runs that follow ``node`` token by token, int64 ``[len(tokens)]``."""
        path: list[int] = []
        for token in tokens:
            key = (node, int(token))
            child = self._children.get(key)
            if child is None:
                child = len(self._parents)
                self._children[key] = child
                self._parents.append(node)
                self._tokens.append(key[1])
            path.append(child)
            node = child
        return np.array(path, np.int64)

    def path(self, tokens: Iterable[int]) -> I64:
        """Numbers of all runs from position 0: entry ``p`` stands for tokens ``0 .. p``.

        All are in the position regime of the whole run.
        """
        tokens = list(tokens)
        return self.extend(LONG_ROOT if self.regime(len(tokens)) else ROOT, tokens)

    def tokens(self, node: int) -> list[int]:
        """The tokens of a run."""
        found: list[int] = []
        while node > LONG_ROOT:
            found.append(self._tokens[node])
            node = self._parents[node]
        return found[::-1]

    def length(self, node: int) -> int:
        """Number of tokens of a run."""
        return len(self.tokens(node))
