"""The engine for servers: one thread steps, any number of tasks wait for their pieces.

The event loop never waits for a step: submissions and aborts go through an inbox that the stepping thread
empties between steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from kvern.engine.llm import LLM, Prompt
from kvern.engine.outputs import RequestOutput, StreamDelta
from kvern.engine.params import SamplingParams
from kvern.engine.tracking import RequestState
from kvern.errors import KvernError


@dataclass(slots=True, eq=False)
class _Waiter:
    """One task's end of a request."""

    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[StreamDelta | BaseException] = field(default_factory=asyncio.Queue)
    state: RequestState | None = None
    is_gone: bool = False

    def put(self, piece: StreamDelta | BaseException) -> None:
        """Hand a piece to the task, from the stepping thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class AsyncLLM:
    """Serves an `LLM` to asyncio tasks.

    Example:
        >>> engine = AsyncLLM(LLM("smollm2"))
        >>> async for delta in engine.stream("Hello"): print(delta.text, end="")
        >>> await engine.close()
    """

    def __init__(self, llm: LLM) -> None:
        """Start the stepping thread; the LLM then belongs to this object."""
        self.llm = llm
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._waiters: list[_Waiter] = []
        self._is_closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvern-step-loop", daemon=True)
        self._thread.start()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[StreamDelta]:
        """Pieces of one answer; cancelling the task or leaving the loop aborts the request.

        Raises:
            InputError: the prompt or a parameter cannot be served.
            KvernError: the engine is closed or has failed.
        """
        waiter = _Waiter(asyncio.get_running_loop())
        self._post(lambda: self._submit(waiter, prompt, params, request_id), waiter)
        try:
            while True:
                piece = await waiter.pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
                if piece.output is not None:
                    return
        finally:
            waiter.is_gone = True
            with contextlib.suppress(
                KvernError
            ):  # a closed or broken engine has dropped it already
                self._post(lambda: self._drop(waiter))

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestOutput:
        """The whole answer; raises as `stream`."""
        output: RequestOutput | None = None
        async for delta in self.stream(prompt, params, request_id):
            output = delta.output or output
        if output is None:
            raise KvernError("the engine ended without a result")
        return output

    async def close(self) -> None:
        """Abort what runs, stop the thread and close the LLM."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self.llm.close()

    def _post(self, action: Callable[[], None], waiter: _Waiter | None = None) -> None:
        """Have the stepping thread do something before its next step."""
        with self._wake:
            if self._failure is not None:
                raise KvernError(f"the engine was stopped by an error: {self._failure}")
            if self._is_closing:
                raise KvernError("the engine is closed: make a new one")
            if waiter is not None:
                self._waiters.append(waiter)
            self._inbox.append(action)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._inbox or self._is_closing or self.llm.has_work):
                        self._wake.wait()
                    if self._is_closing:
                        break
                    actions, self._inbox = self._inbox, deque()
                for action in actions:
                    action()
                self.llm.step()
                self._deliver()
        except BaseException as error:  # a broken step loop must answer everybody, not hang them
            with self._wake:
                self._failure = error
        with self._wake:
            self._refuse_all()

    def _submit(
        self, waiter: _Waiter, prompt: Prompt, params: SamplingParams | None, request_id: str | None
    ) -> None:
        if waiter.is_gone:
            return
        try:
            waiter.state = self.llm.submit(prompt, params, request_id)
        except Exception as error:  # one bad request is its own sender's business
            waiter.put(error)

    def _drop(self, waiter: _Waiter) -> None:
        if waiter.state is not None:
            self.llm.release(waiter.state)
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _deliver(self) -> None:
        finished: list[_Waiter] = []
        for waiter in list(self._waiters):
            state = waiter.state
            while state is not None and state.deltas:
                waiter.put(state.deltas.popleft())
            if state is not None and state.output is not None:
                finished.append(waiter)
        for waiter in finished:
            self._drop(waiter)

    def _refuse_all(self) -> None:
        reason = (
            "is closed" if self._failure is None else f"was stopped by an error: {self._failure}"
        )
        for waiter in self._waiters:
            waiter.put(KvernError(f"the engine {reason}"))
        self._waiters.clear()
