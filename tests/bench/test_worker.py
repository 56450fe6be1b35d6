"""The protocol, with a peer whose times are made up."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern.bench.worker import Worker, WorkerError
from kvern.bench.works import Item, work_of

ITEM = Item("a", "a", 2, 0, 4, 3, "decode")
WORK = work_of(ITEM, 0, 300)


@pytest.fixture
def worker(fake_adapter: Path, tmp_path: Path) -> Iterator[Worker]:
    with (
        (tmp_path / "log").open("wb") as log,
        Worker("fake", sys.executable, fake_adapter, 2, log) as started,
    ):
        yield started


def load(worker: Worker, **options: Any) -> Any:
    return worker.ask("load", {"model": "m", **options}, timeout_s=60)


def test_load_and_run(worker: Worker) -> None:
    assert load(worker)["version"] == "fake 1.0"
    record = worker.ask("run", WORK, timeout_s=60)
    assert [request["new_tokens"] for request in record["requests"]] == [3, 3]
    assert record["peak_rss_bytes"] > 2**20
    assert worker.age_s > 0


def test_what_libraries_print_does_not_reach_the_protocol(worker: Worker, tmp_path: Path) -> None:
    load(worker)
    log = (tmp_path / "log").read_text()
    assert "libraries print where they like" in log
    assert "even past Python" in log


def test_a_failure_is_one_sentence_and_the_worker_goes_on(worker: Worker) -> None:
    load(worker, fails_on="a")
    with pytest.raises(WorkerError, match="fake: RuntimeError: out of memory"):
        worker.ask("run", WORK, timeout_s=60)
    assert worker.ask("run", work_of(ITEM, 1, 300) | {"item": "b"}, timeout_s=60)["wall_s"] == 2.0
    with pytest.raises(WorkerError, match="no attribute 'limits'"):
        worker.ask("limits", timeout_s=60)


def test_a_worker_that_dies_says_how(worker: Worker) -> None:
    load(worker, dies_on="a")
    with pytest.raises(WorkerError, match="ended during run with exit code 3"):
        worker.ask("run", WORK, timeout_s=60)
    with pytest.raises(WorkerError, match="ended"):
        worker.ask("run", WORK, timeout_s=60)


def test_a_worker_that_takes_too_long_is_ended(worker: Worker) -> None:
    load(worker, sleep_s=60.0)
    with pytest.raises(WorkerError, match="did not finish run within 0 s"):
        worker.ask("run", WORK, timeout_s=0.2)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_worker_rests_while_it_is_not_asked(worker: Worker) -> None:
    load(worker)
    status = Path(f"/proc/{worker.pid}/status")
    deadline = time.monotonic() + 10
    while "State:\tT" not in status.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "State:\tT" in status.read_text()


def test_an_interpreter_that_is_not_there(tmp_path: Path, fake_adapter: Path) -> None:
    with (tmp_path / "log").open("wb") as log, pytest.raises(WorkerError, match="does not start"):
        Worker("gone", tmp_path / "python", fake_adapter, 2, log)
