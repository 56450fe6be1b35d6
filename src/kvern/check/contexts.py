"""Every run of tokens from position 0, as one number: what a cached key and value must stand for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvern.spec.regimes import PositionRegimes

I64 = npt.NDArray[np.int64]

UNWRITTEN = 0


class Contexts:
    """A trie of token runs. Node 0 is "nothing was written"; the empty run of a regime is a root.

    Two slots hold exchangeable content exactly when they carry the same number: keys and values depend on
    all tokens up to their own, on the position regime, and on nothing else.
    """

    def __init__(self, regimes: PositionRegimes | None = None) -> None:
        """Args: regimes: which lengths turn alike; None where all do."""
        self._regimes = regimes
        self._children: dict[tuple[int, int], int] = {}
        self._parents = [UNWRITTEN]
        self._tokens = [-1]
        self._roots: dict[int, int] = {}

    def regime(self, length: int) -> int:
        """The position regime of a run of ``length`` tokens."""
        return 0 if self._regimes is None else self._regimes.of(length)

    def root(self, regime: int) -> int:
        """The number of the empty run in a regime."""
        found = self._roots.get(regime)
        if found is None:
            found = self._roots[regime] = self._add(UNWRITTEN, -1)
        return found

    def _add(self, parent: int, token: int) -> int:
        self._parents.append(parent)
        self._tokens.append(token)
        return len(self._parents) - 1

    def extend(self, node: int, tokens: Iterable[int]) -> I64:
        """Numbers of the runs that follow ``node`` token by token, int64 ``[len(tokens)]``."""
        path: list[int] = []
        for token in tokens:
            key = (node, int(token))
            child = self._children.get(key)
            if child is None:
                child = self._children[key] = self._add(*key)
            path.append(child)
            node = child
        return np.array(path, np.int64)

    def path(self, tokens: Iterable[int]) -> I64:
        """Numbers of all runs from position 0: entry ``p`` stands for tokens ``0 .. p``.

        All are in the position regime of the whole run.
        """
        tokens = list(tokens)
        return self.extend(self.root(self.regime(len(tokens))), tokens)

    def tokens(self, node: int) -> list[int]:
        """The tokens of a run."""
        found: list[int] = []
        while self._parents[node] != UNWRITTEN:
            found.append(self._tokens[node])
            node = self._parents[node]
        return found[::-1]

    def length(self, node: int) -> int:
        """Number of tokens of a run."""
        return len(self.tokens(node))
