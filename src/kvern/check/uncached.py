"""The answer without the cache: logits of full passes, kept by what they stand for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvern.check.compare import NO_DIFFERENCE, Difference, compare
from kvern.check.contexts import Contexts
from kvern.core.plan import Chunk
from kvern.core.sequence import Sequence as TokenSequence

F32 = npt.NDArray[np.float32]

MAX_KEPT_BYTES = 512 * 2**20
"""Of whole rows. Beyond it a row that must be equal is kept as its digest, and computed again if it is not."""


@dataclass(frozen=True, slots=True)
class UncachedRow:
    """What is known of one position.

    Attributes:
        logits: ``[vocab_size]``; None where only the digest is kept.
        layers: hidden states ``[layers, hidden]`` when traced.
        digest: of the logits' bytes, where that is all that is kept.
        is_unclear: the row lies behind a near tie of experts, so that a right computation may differ.
    """

    logits: F32 | None
    layers: F32 | None = None
    digest: bytes = b""
    is_unclear: bool = False


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


Sink = Callable[[int, UncachedRow], None]
"""Takes a context number and its row."""


class UncachedRows:
    """All rows computed without the cache so far, by context number."""

    def __init__(
        self,
        contexts: Contexts,
        compute: Callable[[tuple[int, ...], Sink], None],
        *,
        is_exact: bool,
    ) -> None:
        """Prepare.

        Args:
            contexts: gives the numbers.
            compute: runs a full pass over tokens and hands each row out.
            is_exact: rows must be equal bit for bit, so that digests can stand for them.
        """
        self._contexts = contexts
        self._compute = compute
        self._is_exact = is_exact
        self._rows: dict[int, UncachedRow] = {}
        self._num_bytes = 0

    def find(self, node: int) -> UncachedRow | None:
        """The row, if it is known."""
        return self._rows.get(node)

    def put(self, node: int, row: UncachedRow) -> None:
        """Keep a row of a full pass; the first one stays."""
        if node in self._rows:
            return
        assert row.logits is not None
        is_kept = not self._is_exact or self._num_bytes + row.logits.nbytes <= MAX_KEPT_BYTES
        if is_kept or row.layers is not None or not np.isfinite(row.logits).all():
            self._num_bytes += row.logits.nbytes
        else:
            row = replace(row, logits=None, digest=digest_of(row.logits))
        self._rows[node] = row

    def get(self, node: int) -> UncachedRow | None:
        """The row, computed if need be; None when the engine gives none."""
        if node not in self._rows:
            self._compute(tuple(self._contexts.tokens(node)), self.put)
        return self._rows.get(node)

    def whole(self, node: int) -> UncachedRow | None:
        """The row with its logits, computed again where only its digest was kept."""
        known = self.get(node)
        if known is None or known.logits is not None:
            return known
        found: dict[int, UncachedRow] = {}

        def take(other: int, row: UncachedRow) -> None:
            if other == node:
                found[node] = row

        self._compute(tuple(self._contexts.tokens(node)), take)
        if node in found:
            self._rows[node] = found[node]
        return found.get(node)

    def compare(self, node: int, observed: F32) -> Difference | None:
        """How far an observed row lies from the known one; None where that is not known at hand."""
        known = self._rows.get(node)
        if known is None:
            return None
        if known.logits is not None:
            return compare(observed, known.logits)
        return NO_DIFFERENCE if digest_of(observed) == known.digest else None

    def prepare(self, tokens: Sequence[int]) -> None:
        """Compute all rows of a run, unless the last one is known."""
        self.get(int(self._contexts.path(tokens)[-1]))


def digest_of(row: F32) -> bytes:
    """Equal exactly for rows of equal bits; -0.0 counts as 0.0."""
    return hashlib.blake2b((row + np.float32(0)).tobytes(), digest_size=16).digest()
