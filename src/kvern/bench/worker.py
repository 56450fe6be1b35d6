"""The other end of `kvern.bench.serve`: one engine in a process of its own.

A worker that is not measuring is stopped (SIGSTOP), so that threads of one engine that spin while
idle cannot slow another.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from kvern.errors import KvernError

SERVE = Path(__file__).with_name("serve.py")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LOG_TAIL_CHARS = 600
READ_BYTES = 1 << 16


class WorkerError(KvernError):
    """An engine's worker failed; the message is its own sentence."""


class Worker:
    """A process that loads one engine and carries out work on it."""

    def __init__(
        self,
        label: str,
        python: str | Path,
        adapter: str | Path,
        threads: int,
        log: IO[bytes],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process; it loads nothing yet.

        Args:
            label: for messages.
            python: the interpreter of the engine's environment.
            adapter: file with a class ``Adapter``; see `kvern.bench.serve`.
            threads: for libraries that read it from the environment.
            log: where what the engine prints goes.
            environment: further variables.
        """
        self.label = label
        self._log = log
        self._buffer = b""
        self._started_s = time.perf_counter()
        variables = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
        try:
            self._process = subprocess.Popen(
                [str(python), str(SERVE), str(adapter)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**variables, **(environment or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(f"{label} does not start: {error}") from error

    @property
    def pid(self) -> int:
        """The process's id, which is also its group's."""
        return self._process.pid

    @property
    def age_s(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._started_s

    def ask(self, operation: str, args: Any = None, timeout_s: float = 1800.0) -> Any:
        """Carry out one operation and wait for its result; the worker rests before and after.

        Raises:
            WorkerError: it failed, ended, or did not answer in time (it is ended then).
        """
        message = {"op": operation} if args is None else {"op": operation, "args": args}
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(f"{self.label} has ended: {self._last_words()}") from error
        answer = json.loads(self._read_line(operation, timeout_s))
        if not answer["ok"]:
            raise WorkerError(f"{self.label}: {answer['error']}")
        self._signal(signal.SIGSTOP)
        return answer["result"]

    def _read_line(self, operation: str, timeout_s: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise WorkerError(
                        f"{self.label} did not finish {operation} within {timeout_s:,.0f} s"
                    )
                read = os.read(stdout.fileno(), READ_BYTES)
                if not read:
                    self._process.wait()
                    raise WorkerError(
                        f"{self.label} ended during {operation} with exit code "
                        f"{self._process.returncode}: {self._last_words()}"
                    )
                self._buffer += read
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _last_words(self) -> str:
        """The end of what it printed, as one line."""
        try:
            text = Path(self._log.name).read_text(errors="replace")
        except (OSError, TypeError):
            return "no output"
        return " ".join(text.split())[-LOG_TAIL_CHARS:] or "no output"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Worker:
        """Use as a context manager; ends the process."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._process.poll() is None:
            with contextlib.suppress(WorkerError):
                self.ask("close", timeout_s=10.0)
        self.kill()


def own_environment(package_parents: Sequence[str | Path]) -> dict[str, str]:
    """Variables that let a worker import the very package that runs here."""
    paths = [str(path) for path in package_parents]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {"PYTHONPATH": os.pathsep.join(paths)}
