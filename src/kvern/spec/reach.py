"""Which past tokens are still needed: the *reach* half of content x reach.

A reach is defined by one function, `sees(q)`: the positions that the query at position q attends
to, itself included. Everything else follows from it. `live(n)` is the union of `sees(q)` over all
q >= n, cut to the n positions that exist: what must be kept once n tokens are computed. Freeing,
hit validity, admission, offload and the kernels' window all ask `live` and `sees`.

    Window(4, sinks=1)      position  0 1 2 3 4 5 6 7 8 9
    sees(8)                           x         x x x x
    live(8)                           x         x x x       (8 computed; query 8 comes next)
"""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]
"""Half-open run of token positions: (start, stop), never empty."""


@dataclass(frozen=True, slots=True)
class All:
    """Full attention: every past token, for ever."""

    def sees(self, q: int) -> tuple[Span, ...]:
        """Positions that the query at position `q` attends to."""
        return ((0, q + 1),)

    def live(self, n: int) -> tuple[Span, ...]:
        """Positions below `n` that the query at `n` or a later one can still need."""
        return _spans((0, n))

    def max_visible(self, n: int) -> int:
        """The most positions that any single query below `n` sees."""
        return n


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding window: query p sees p-size+1..p, and the first `sinks` positions for ever."""

    size: int
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.sinks < 0:
            raise ValueError(f"{self}: size must be positive and sinks not negative")

    def sees(self, q: int) -> tuple[Span, ...]:
        """Positions that the query at position `q` attends to."""
        return self._joined(q - self.size + 1, q + 1)

    def live(self, n: int) -> tuple[Span, ...]:
        """Positions below `n` that the query at `n` or a later one can still need."""
        return self._joined(n - self.size + 1, n)

    def max_visible(self, n: int) -> int:
        """The most positions that any single query below `n` sees."""
        return min(n, self.size + self.sinks)

    def _joined(self, start: int, stop: int) -> tuple[Span, ...]:
        if start <= self.sinks:
            return _spans((0, stop))
        return _spans((0, self.sinks), (start, stop))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunked local attention: only the query's own chunk, chunks starting at multiples of size."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"{self}: size must be positive")

    def sees(self, q: int) -> tuple[Span, ...]:
        """Positions that the query at position `q` attends to."""
        return ((q // self.size * self.size, q + 1),)

    def live(self, n: int) -> tuple[Span, ...]:
        """Positions below `n` that the query at `n` or a later one can still need."""
        return _spans((n // self.size * self.size, n))

    def max_visible(self, n: int) -> int:
        """The most positions that any single query below `n` sees."""
        return min(n, self.size)


@dataclass(frozen=True, slots=True)
class Last:
    """Recurrent state: the state behind the previous token stands for all tokens before it."""

    def sees(self, q: int) -> tuple[Span, ...]:
        """The position whose state the query at `q` starts from, and `q` itself."""
        return ((max(q - 1, 0), q + 1),)

    def live(self, n: int) -> tuple[Span, ...]:
        """The last computed position: its state is all that later tokens need."""
        return _spans((max(n - 1, 0), n))

    def max_visible(self, n: int) -> int:
        """One state, however many tokens it stands for."""
        return min(n, 1)


Reach = All | Window | Chunk | Last


def num_positions(spans: tuple[Span, ...]) -> int:
    """How many positions the spans cover together."""
    return sum(stop - start for start, stop in spans)


def _spans(*spans: Span) -> tuple[Span, ...]:
    return tuple(span for span in spans if span[0] < span[1])
