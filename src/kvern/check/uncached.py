"""The answer without the cache: logits of full passes, kept by what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.check.contexts import Contexts
from kvern.core.plan import Chunk
from kvern.core.sequence import Sequence as TokenSequence

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class UncachedRow:
    """Logits ``[vocab_size]`` behind a run of tokens; hidden states ``[layers, hidden]`` when traced."""

    logits: F32
    layers: F32 | None = None


class LayerTrace:
    """Hidden states of the current step, copied layer by layer when they are wanted."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._layers: list[F32] = []
        self._rows: dict[tuple[int, int], int] = {}

    def on_layer(self, chunks: Sequence[Chunk], layer: int, hidden: F32) -> None:
        """Called by the runner after each layer."""
        if not self.is_on:
            return
        if layer == 0:
            self._layers, self._rows = [], {}
            for chunk in chunks:
                for position in range(chunk.start, chunk.start + chunk.length):
                    self._rows[chunk.seq.seq_id, position] = len(self._rows)
        self._layers.append(hidden.copy())

    def row(self, seq: TokenSequence, position: int) -> F32 | None:
        """Hidden states ``[layers, hidden]`` of one token of this step."""
        index = self._rows.get((seq.seq_id, position))
        if not self.is_on or index is None:
            return None
        return np.stack([layer[index] for layer in self._layers])


class UncachedRows:
    """All rows computed without the cache so far, by context number."""

    def __init__(self, contexts: Contexts, compute: Callable[[tuple[int, ...]], None]) -> None:
        """Args: compute: runs a full pass over the tokens; the engine's rows come back through `put`."""
        self._contexts = contexts
        self._compute = compute
        self._rows: dict[int, UncachedRow] = {}

    def find(self, node: int) -> UncachedRow | None:
        """The row, if it is known."""
        return self._rows.get(node)

    def put(self, node: int, row: UncachedRow) -> None:
        """Keep a row of a full pass; the first one stays."""
        self._rows.setdefault(node, row)

    def get(self, node: int) -> UncachedRow | None:
        """The row, computed if need be; None when the engine gives none."""
        if node not in self._rows:
            self._compute(tuple(self._contexts.tokens(node)))
        return self._rows.get(node)

    def prepare(self, tokens: Sequence[int]) -> None:
        """Compute all rows of a run, unless the last one is known."""
        self.get(int(self._contexts.path(tokens)[-1]))
