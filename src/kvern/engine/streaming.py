"""One streaming answer, as an iterator that owns its request."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from kvern.engine.outputs import StreamDelta
from kvern.engine.step_loop import StepLoop
from kvern.engine.tracking import RequestState


class DeltaStream(Iterator[StreamDelta]):
    """Pieces of one answer; the last one carries the whole `RequestOutput`.

    The request ends with the stream: when it is exhausted, closed, left by a ``with`` block, or forgotten,
    also if it was never read.
    """

    def __init__(self, loop: StepLoop, state: RequestState) -> None:
        """Args: state: a submitted request."""
        self._loop = loop
        self._state = state
        self._is_over = False

    @property
    def request_id(self) -> str:
        """For `LLM.abort`."""
        return self._state.request_id

    def __next__(self) -> StreamDelta:
        state = self._state
        while not self._is_over:
            try:
                while not state.deltas:
                    self._loop.advance(lambda: bool(state.deltas))
            except BaseException:
                self.close()
                raise
            delta = state.deltas.popleft()
            if delta.output is not None:
                self.close()
            if delta.text or delta.token_ids or delta.finish_reason or delta.output:
                return delta
        raise StopIteration

    def close(self) -> None:
        """End the request if it still runs; further pieces are dropped."""
        if not self._is_over:
            self._is_over = True
            self._loop.release([self._state])

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
