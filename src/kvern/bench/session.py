"""A whole benchmark: workers, interleaved runs, a profile of our own, one document.

load all engines, each in its process          (kvern bf16, kvern int8, llama.cpp Q4_0, ...)
limits                                         first measurement
for each item:
    run 1:  engine 1, engine 2, engine 3       the same prompts for all;
    run 2:  engine 2, engine 3, engine 1       the order rotates, so that a machine that slows
    run 3:  engine 3, engine 1, engine 2       down favours nobody
    one profiled run of each of our own
limits                                         second measurement; the better counts
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import kvern
from kvern import catalog
from kvern.bench import own
from kvern.bench.figures import RunFigures, figures_of
from kvern.bench.limits import Limits, best_of
from kvern.bench.peers import Absent, Engine, find_peers
from kvern.bench.results import engine_document, item_document
from kvern.bench.start import cold_start
from kvern.bench.worker import Worker, WorkerError, own_environment
from kvern.bench.works import (
    KERNEL_CASE,
    OTHER_CASES,
    START_CASE,
    Item,
    items_of,
    most_tokens,
    split_fitting,
    work_of,
)
from kvern.errors import UsageError
from kvern.spec.configs import load_model_spec
from kvern.spec.layers import ModelSpec

OWN_PEER = "kvern"
SCHEMA_VERSION = 1
DEFAULT_THREADS = 2
LEAST_RUNS = 3
BUSY_SHARE = 0.5
"""A load average above this part of the cores is told as a warning."""

Progress = Callable[[str], None]
"""Told in a few words what is measured now."""

Keep = Callable[[dict[str, Any]], None]
"""Given the document as far as it is known, after each item."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure.

    Attributes:
        model: catalogue name, GGUF file or Hugging Face folder.
        cases: names from `kvern.bench.works.CASES`.
        kv_formats: one engine of our own for each.
        threads: for every engine.
        runs: of each item and engine.
        quick: tiny sizes; figures mean nothing.
        against: names from `kvern.bench.peers.PEERS`.
        peers_dir: where those are installed.
        engine: further `EngineSettings` of our own engines.
        done: an earlier document of the same work that was cut short; its items are kept, not measured anew.
    """

    model: str
    cases: tuple[str, ...]
    kv_formats: tuple[str, ...] = ("bf16",)
    threads: int = DEFAULT_THREADS
    runs: int = LEAST_RUNS
    quick: bool = False
    against: tuple[str, ...] = ()
    peers_dir: Path = Path()
    engine: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check.

        Raises:
            UsageError: names the option, its value and what is allowed.
        """
        least = 1 if self.quick else LEAST_RUNS
        if self.runs < least:
            raise UsageError(
                f"{self.runs} runs tell no spread: ask for at least {least}, or for --quick"
            )
        if self.threads < 1:
            raise UsageError(f"the number of threads is {self.threads}: give at least 1")


def run_bench(
    options: BenchOptions,
    progress: Progress = lambda _: None,
    keep: Keep = lambda _: None,
) -> dict[str, Any]:
    """Measure everything that was asked for.

    Args:
        options: what to measure.
        progress: told what is measured now.
        keep: given the document after each item, with what is known by then, so that a run that is cut
            short has lost nothing. Its `is_complete` is false, and its limits are those of the start.

    Returns:
        The document that ``kvern bench --json`` prints; docs/performance.md describes it.

    Raises:
        KvernError: a wrong option, or one of our own engines fails. A peer that fails is reported.
    """
    path = catalog.resolve(options.model)
    spec = load_model_spec(path)
    items, left_out = split_fitting(items_of(options.cases, options.quick), spec.max_model_len)
    if not items and not set(OTHER_CASES) & set(options.cases):
        raise UsageError(f"nothing to measure: {'; '.join(left_out)}")
    model = {"name": options.model, "file": path.name, "bytes": _bytes_of(path)}
    earlier = _earlier(options, model)
    items = [item for item in items if item.key not in {done["key"] for done in earlier["items"]}]
    machine = machine_document(options.threads)
    start = earlier["cold_start"]
    if start is None and START_CASE in options.cases:
        start = _cold_start(options, path, progress)
    peers, absent = find_peers(options.against, options.peers_dir, options.model, path)
    engines = [*_own_engines(options, path), *peers]
    frame = {
        "schema": SCHEMA_VERSION,
        "kvern": kvern.__version__,
        "quick": options.quick,
        "machine": machine,
        "model": model,
        "runs": options.runs,
        "left_out": left_out,
        "warnings": warnings_of(machine),
        "cold_start": start,
    }
    with contextlib.ExitStack() as stack:
        session = _Session(options, items, _vocab_size(spec), progress)
        session.start(engines, stack)

        def document(
            limits: Limits, results: list[Any], kernels: list[Any], is_complete: bool
        ) -> dict[str, Any]:
            return {
                **frame,
                "is_complete": is_complete,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "limits": limits.document(),
                "engines": list(session.described.values()),
                "absent": [asdict(a) for a in [*absent, *session.failed]],
                "items": [*earlier["items"], *results],
                "kernels": kernels or earlier["kernels"],
            }

        measured = session.measure(lambda limits, items: keep(document(limits, items, [], False)))
        return document(*measured, True)


def _earlier(options: BenchOptions, model: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run of the same work has left.

    Raises:
        UsageError: it was other work, so that the two cannot stand in one table.
    """
    done = options.done
    if done is None:
        return {"items": [], "kernels": [], "cold_start": None}
    wanted = {
        "schema": SCHEMA_VERSION,
        "kvern": kvern.__version__,
        "model": model,
        "runs": options.runs,
        "quick": options.quick,
    }
    for name, value in wanted.items():
        if done.get(name) != value:
            raise UsageError(
                f"the run to go on with has {name} {done.get(name)}, this one {value}: "
                "repeat its options, or name another file with --out"
            )
    return done


def machine_document(threads: int) -> dict[str, Any]:
    """What figures depend on: processor, cores, threads, system."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), cpu)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average_before": load,
    }


def warnings_of(machine: dict[str, Any]) -> list[str]:
    """What makes the figures doubtful, a sentence each."""
    load, cores, threads = machine["load_average_before"], machine["cores"], machine["threads"]
    found = []
    if load is not None and load > BUSY_SHARE * cores:
        found.append(
            f"the machine was busy before the first run (load average {load:.1f} on {cores} cores): "
            "ratios lean towards engines whose threads do not wait for each other in a loop"
        )
    if threads > cores:
        found.append(f"{threads} threads on {cores} cores slow every engine that has a barrier")
    return found


def _cold_start(options: BenchOptions, path: Path, progress: Progress) -> dict[str, Any]:
    progress("cold start of kvern run")
    return cold_start(path, options.threads, options.runs, _own_environment())


def _own_environment() -> dict[str, str]:
    return own_environment([Path(kvern.__file__).resolve().parents[1]])


def _own_engines(options: BenchOptions, path: Path) -> list[Engine]:
    return [
        Engine(
            label=f"{OWN_PEER} {kv_format}",
            peer=OWN_PEER,
            python=Path(sys.executable),
            adapter=Path(own.__file__),
            model=path,
            same_file=True,
            options={"kv_format": kv_format, "engine": options.engine},
            environment=_own_environment(),
        )
        for kv_format in options.kv_formats
    ]


def _vocab_size(spec: ModelSpec) -> int:
    if spec.vocab_size is None:
        raise UsageError(f"{spec.name} states no vocabulary size, so no prompts can be drawn")
    return spec.vocab_size


def _bytes_of(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return path.stat().st_size


class _Session:
    """The workers of one benchmark."""

    def __init__(
        self, options: BenchOptions, items: Sequence[Item], vocab_size: int, progress: Progress
    ) -> None:
        self.options = options
        self.items = items
        self.vocab_size = vocab_size
        self.progress = progress
        self.engines: list[Engine] = []
        self.workers: dict[str, Worker] = {}
        self.described: dict[str, dict[str, Any]] = {}
        self.failed: list[Absent] = []

    def start(self, engines: Sequence[Engine], stack: contextlib.ExitStack) -> None:
        """Load every engine; a peer that does not load is named as absent."""
        for engine in engines:
            self.progress(f"{engine.label}: loading")
            log = stack.enter_context(tempfile.NamedTemporaryFile(prefix="kvern-bench-"))  # noqa: SIM115
            try:
                worker = stack.enter_context(
                    Worker(
                        engine.label,
                        engine.python,
                        engine.adapter,
                        self.options.threads,
                        log,
                        engine.environment,
                    )
                )
                self._load(engine, worker)
            except WorkerError as error:
                if engine.peer == OWN_PEER:
                    raise
                self.failed.append(Absent(engine.label, str(error)))

    def _load(self, engine: Engine, worker: Worker) -> None:
        loaded = worker.ask("load", self._load_options(engine))
        first = Item("first", "a", 1, 0, 8, 2, "decode")
        record = worker.ask("run", work_of(first, 0, self.vocab_size))
        loaded["start_s"] = worker.age_s - record["wall_s"] + record["requests"][0]["ttft_s"]
        if engine.peer == OWN_PEER:
            self.progress(f"{engine.label}: comparing logits")
            loaded["quality"] = worker.ask("quality")
        self.described[engine.label] = engine_document(engine, loaded)
        self.engines.append(engine)
        self.workers[engine.label] = worker

    def _load_options(self, engine: Engine) -> dict[str, Any]:
        return {
            "model": str(engine.model),
            "threads": self.options.threads,
            "num_tokens": most_tokens(self.items),
            "max_num_seqs": max([32, *(item.num_requests for item in self.items)]),
            "max_request_tokens": max([64, *(item.request_tokens for item in self.items)]),
            **engine.options,
        }

    def measure(
        self, keep: Callable[[Limits, list[dict[str, Any]]], None]
    ) -> tuple[Limits, list[dict[str, Any]], list[dict[str, Any]]]:
        """The machine's limits, taken before and after all items; the items; attention alone."""
        ours = self.workers[self.engines[0].label]
        self.progress("the machine's limits")
        args = {"quick": self.options.quick}
        limits = Limits(**ours.ask("limits", args))
        measured = []
        for item in self.items:
            runs, errors = self._runs(item)
            measured.append((item, runs, errors, self._profiles(item, limits)))
            keep(limits, [item_document(*entry, self.engines, limits) for entry in measured])
        kernels = self._kernels(ours, limits) if KERNEL_CASE in self.options.cases else []
        self.progress("the machine's limits again")
        limits = best_of(limits, Limits(**ours.ask("limits", args)))
        return limits, [item_document(*entry, self.engines, limits) for entry in measured], kernels

    def _kernels(self, ours: Worker, limits: Limits) -> list[dict[str, Any]]:
        self.progress("attention alone")
        args = {
            "limits": limits.document(),
            "kv_formats": self.options.kv_formats,
            "runs": self.options.runs,
            "quick": self.options.quick,
        }
        found: list[dict[str, Any]] = ours.ask("kernels", args)
        return found

    def _runs(self, item: Item) -> tuple[dict[str, list[RunFigures]], dict[str, str]]:
        """Each engine's figures, in the order of the runs, and a sentence for each that failed."""
        taking_part = [e for e in self.engines if e.takes_part_in(item.case)]
        runs: dict[str, list[RunFigures]] = {engine.label: [] for engine in taking_part}
        errors: dict[str, str] = {}
        for run in range(self.options.runs):
            work = work_of(item, run, self.vocab_size)
            turn = run % len(taking_part)
            for engine in taking_part[turn:] + taking_part[:turn]:
                if engine.label in errors:
                    continue
                self.progress(f"{item.key}, run {run + 1} of {self.options.runs}: {engine.label}")
                try:
                    record = self.workers[engine.label].ask("run", work)
                    runs[engine.label].append(figures_of(item, record))
                except WorkerError as error:
                    if engine.peer == OWN_PEER:
                        raise
                    errors[engine.label] = str(error)
        return runs, errors

    def _profiles(self, item: Item, limits: Limits) -> dict[str, dict[str, Any]]:
        """Recorded runs of each of our own engines, with prompts of their own."""
        profiles = {}
        for engine in self.engines:
            if engine.peer == OWN_PEER:
                self.progress(f"{item.key}, profile: {engine.label}")
                args = {
                    "timed": work_of(item, self.options.runs, self.vocab_size),
                    "untouched": work_of(item, self.options.runs + 1, self.vocab_size),
                    "limits": limits.document(),
                }
                profiles[engine.label] = self.workers[engine.label].ask("profile", args)
        return profiles
