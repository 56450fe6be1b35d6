"""A long run of the bookkeeping alone: memory and time must stay flat.

    python benchmarks/bookkeeping_soak.py [--requests 1000000] [--blocks 20000]

Requests share prefixes, branch, repeat, come with many salts and are sometimes aborted; the pool is
always full, so blocks are replaced all the time. One line per tenth of the run.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np
from bookkeeping import make_scheduler, pretend, resident_bytes

from kvern.core.sequence import Request


def main() -> None:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--replacement", default="lru")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(
        options.blocks,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        replacement=options.replacement,
    )
    stems = [rng.integers(0, 50_000, 2000, dtype=np.int32) for _ in range(200)]
    per_line = max(options.requests // 10, 1)
    started, steps = time.process_time(), 0
    for number in range(options.requests):
        stem = stems[int(rng.integers(len(stems)))][: int(rng.integers(1, 600))]
        tail = rng.integers(0, 50_000, int(rng.integers(1, 60)), dtype=np.int32)
        salt = None if rng.random() < 0.7 else f"tenant{number % 5000}"
        prompt = np.concatenate((stem, tail))
        scheduler.add(Request(f"r{number}", prompt, int(rng.integers(1, 12)), cache_salt=salt))
        if rng.random() < 0.02:
            scheduler.abort(f"r{max(number - 20, 0)}")
        while len(scheduler.state.records) >= 64:
            plan = scheduler.plan()
            scheduler.commit(plan, pretend(plan))
            steps += 1
        if (number + 1) % per_line == 0:
            gc.collect()
            seconds = time.process_time() - started
            stats = scheduler.stats()
            print(
                f"{number + 1:>9,} requests  {seconds / per_line * 1e6:7.1f} us CPU per request  "
                f"{steps:>7,} steps  {resident_bytes() / 1e6:6.1f} MB  "
                f"{scheduler.state.index.tree.num_nodes:>7,} nodes  "
                f"{len(scheduler.state.index.roots):>5,} keys  "
                f"{stats.replaced_blocks:>11,} replaced  {stats.counters.preemptions} preempted",
                flush=True,
            )
            scheduler.check_integrity().raise_if_broken()
            started, steps = time.process_time(), 0


if __name__ == "__main__":
    main()
