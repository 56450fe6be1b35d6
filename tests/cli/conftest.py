from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.fake_engine import FakeLLM

import kvern
from kvern.cli import engine_options
from kvern.cli.main import main

Command = Callable[..., int]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Replaces the engine by one that needs no model; tests script its answers."""

    class Engine(FakeLLM):
        pass

    monkeypatch.setitem(vars(kvern), "LLM", Engine)
    monkeypatch.setattr(engine_options, "resolve", lambda name, progress: Path(name))
    return Engine


class Terminal(io.StringIO):
    """A stdin that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def kvern_command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command line in this process: `kvern_command("run", "Hi", stdin=b"...")`."""

    def call(*arguments: str, stdin: bytes | None = None) -> int:
        piped = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8") if stdin is not None else None
        monkeypatch.setattr("sys.stdin", piped if piped is not None else Terminal())
        return main(arguments)

    return call
