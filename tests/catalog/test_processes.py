"""Fetches that meet each other, or an early end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.catalog.fake_index import FakeIndex, save_entry

from kvern.catalog import fetch_entry

DRIVER = Path(__file__).with_name("fetch_driver.py")
LIMIT_S = 30


def start(home: Path, index: FakeIndex, log: Path, seconds: float) -> subprocess.Popen[str]:
    save_entry(index.entry, index.folder / "entry.json")
    return subprocess.Popen(
        [sys.executable, str(DRIVER), str(home), str(index.folder), str(log), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as in a terminal of its own: signals reach its whole group
    )


def wait_for(log: Path) -> None:
    limit = time.monotonic() + LIMIT_S
    while not log.exists():
        assert time.monotonic() < limit, "the stand-in for pip never started"
        time.sleep(0.02)


def test_two_at_once_download_once(index: FakeIndex, home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = start(home, index, log, 1.0)
    wait_for(log)
    second = start(home, index, log, 1.0)
    outputs = [process.communicate(timeout=LIMIT_S) for process in (first, second)]

    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert log.read_text().count("pip started") == 1
    assert "another kvern process is fetching tiny" in outputs[1][1]
    assert outputs[0][0] == outputs[1][0] == f"{home / 'models' / 'tiny.gguf'}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_fetch_breaks_nothing(
    number: signal.Signals, index: FakeIndex, home: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = start(home, index, log, 60.0)
    wait_for(log)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.kill()  # the child lives on as an orphan, as after a real kill -9
    process.communicate(timeout=LIMIT_S)
    models = home / "models"
    leftovers = list(models.glob(".fetch-*"))
    assert not (models / "tiny.gguf").exists()
    assert bool(leftovers) == (number == signal.SIGKILL)

    assert fetch_entry(index.entry).read_bytes() == index.content
    assert not list(models.glob(".fetch-*"))
    if number == signal.SIGKILL:
        os.killpg(process.pid, signal.SIGKILL)
