"""Time and memory of the bookkeeping alone: no tensor, no model.

    python benchmarks/bookkeeping.py [--json] [--blocks 1000000] [--repeats 15] [--replacement lru]

- prompt: match + allocate + seal of a 100,000-token prompt in a pool of one million blocks of 16
  whose blocks are all cached, so every allocation replaces: no hit, half hit, full hit.
- decode: plan + commit of a step with 256 running sequences.
- memory: resident bytes of the pool and its index with every block in use.

Garbage collection stays on; hashing and token verification are included.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from kvern.core.config import SchedulerConfig
from kvern.core.plan import StepPlan, StepResult, TokenChoice
from kvern.core.scheduler import Scheduler
from kvern.core.sequence import Request
from kvern.spec import KV_FORMATS, All, Heads, KVCacheSpec, KVGroup, KVPlan

BLOCK_SIZE = 16
PROMPT_TOKENS = 100_000


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_scheduler(num_blocks: int, **settings: object) -> Scheduler:
    """A scheduler over one full-reach group."""
    k_codec, v_codec = KV_FORMATS["bf16"]
    spec = KVCacheSpec(Heads(1, 8, 8), All(), k_codec=k_codec, v_codec=v_codec)
    group = KVGroup((0,), spec, BLOCK_SIZE, 512)
    config = SchedulerConfig(**{"max_num_batched_tokens": 1 << 20, **settings})  # type: ignore[arg-type]
    return Scheduler(KVPlan((group,), 512, num_blocks, 0), config)


def pretend(plan: StepPlan) -> StepResult:
    """An executor that always answers with token 1."""
    choice = (TokenChoice(1, -1.0),)
    return StepResult(plan.step, [choice for chunk in plan.chunks if chunk.num_samples])


def finish_all(scheduler: Scheduler) -> None:
    """Run until nothing is live."""
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, pretend(plan))


def fill(scheduler: Scheduler, rng: np.random.Generator) -> None:
    """Give every block of the pool some content that nobody holds."""
    count = 0
    while scheduler.stats().free_blocks > 0:
        tokens = rng.integers(0, 50_000, PROMPT_TOKENS, dtype=np.int32)
        scheduler.add(Request(f"fill{count}", tokens, 1))
        finish_all(scheduler)
        count += 1


class Stopwatch:
    """Wall and CPU milliseconds of repeated pieces of work."""

    def __init__(self) -> None:
        self.laps: dict[str, list[tuple[float, float]]] = {}
        self._start = (0.0, 0.0)

    def start(self) -> None:
        """Begin the next lap."""
        self._start = (time.perf_counter(), time.process_time())

    def lap(self, name: str) -> None:
        """End a lap and begin another."""
        now = (time.perf_counter(), time.process_time())
        wall, cpu = now[0] - self._start[0], now[1] - self._start[1]
        self.laps.setdefault(name, []).append((wall * 1e3, cpu * 1e3))
        self.start()

    def report(self) -> dict[str, float]:
        """Medians per piece and of the sums; the worst sum. A busy machine shows in wall time only."""
        columns = list(zip(*self.laps.values(), strict=True))
        walls = [sum(wall for wall, _ in row) for row in columns]
        cpus = [sum(cpu for _, cpu in row) for row in columns]
        pieces = {
            f"{name}_cpu_ms": statistics.median(cpu for _, cpu in laps)
            for name, laps in self.laps.items()
        }
        sums = {
            "cpu_ms": statistics.median(cpus),
            "worst_cpu_ms": max(cpus),
            "wall_ms": statistics.median(walls),
            "best_wall_ms": min(walls),
        }
        return {name: round(value, 3) for name, value in (pieces | sums).items()}


def time_prompts(
    scheduler: Scheduler, repeats: int, rng: np.random.Generator
) -> dict[str, dict[str, float]]:
    """A 100,000-token prompt: add, plan (hash, match, allocate), commit (seal), per kind of hit."""
    results: dict[str, dict[str, float]] = {}
    base = rng.integers(0, 50_000, PROMPT_TOKENS, dtype=np.int32)
    scheduler.add(Request("base", base, 1))
    finish_all(scheduler)
    for kind, num_shared in (("no_hit", 0), ("half_hit", PROMPT_TOKENS // 2), ("full_hit", None)):
        watch = Stopwatch()
        for number in range(repeats):
            prompt = rng.integers(0, 50_000, PROMPT_TOKENS, dtype=np.int32)
            prompt[:num_shared] = base[:num_shared]
            watch.start()
            scheduler.add(Request(f"{kind}{number}", prompt, 2))
            watch.lap("add")
            plan = scheduler.plan()
            watch.lap("plan")
            result = pretend(plan)
            watch.start()
            scheduler.commit(plan, result)
            watch.lap("commit")
            finish_all(scheduler)
        results[kind] = watch.report()
    return results


def time_decodes(num_seqs: int, steps: int) -> dict[str, float]:
    """Plan and commit of a step with `num_seqs` decodes."""
    scheduler = make_scheduler(100_000, max_num_seqs=num_seqs, max_num_batched_tokens=8192)
    rng = np.random.default_rng(1)
    for number in range(num_seqs):
        tokens = rng.integers(0, 50_000, 200 + number, dtype=np.int32)
        scheduler.add(Request(f"d{number}", tokens, 10_000))
    while scheduler.num_waiting or any(
        seq.num_tokens - seq.num_computed_tokens > 1 for seq in scheduler.state.running
    ):
        plan = scheduler.plan()
        scheduler.commit(plan, pretend(plan))
    watch = Stopwatch()
    for _ in range(steps):
        watch.start()
        plan = scheduler.plan()
        watch.lap("plan")
        result = pretend(plan)
        watch.start()
        scheduler.commit(plan, result)
        watch.lap("commit")
    return watch.report()


def main() -> None:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--replacement", default="lru")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    gc.collect()
    before = resident_bytes()
    scheduler = make_scheduler(options.blocks, replacement=options.replacement)
    fill(scheduler, rng)
    gc.collect()
    report = {
        "blocks": options.blocks,
        "replacement": options.replacement,
        "memory_mb": round((resident_bytes() - before) / 1e6, 1),
        "prompt_100k": time_prompts(scheduler, options.repeats, rng),
        "decode_256": time_decodes(256, 400),
    }
    print(json.dumps(report) if options.json else json.dumps(report, indent=2), file=sys.stdout)


if __name__ == "__main__":
    main()
