"""How long commands take to answer, beside the bare interpreter's own start in the same run.

    python benchmarks/startup.py [--runs 5] [--json]

Each command is started anew; medians with the least and the greatest. The last line is the time from the
start of `kvern run` to its first text, model already fetched.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

KVERN = [sys.executable, "-m", "kvern"]
COMMANDS = {
    "python (nothing)": [sys.executable, "-c", "pass"],
    "kvern --help": [*KVERN, "--help"],
    "kvern --version": [*KVERN, "--version"],
    "kvern models": [*KVERN, "models"],
    "kvern inspect smollm2": [*KVERN, "inspect", "smollm2"],
    "kvern plan smollm2 --memory 4GiB": [*KVERN, "plan", "smollm2", "--memory", "4GiB"],
}
FIRST_TEXT = [*KVERN, "run", "Name a river.", "--max-tokens", "4"]


def whole_command(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def first_text() -> float:
    started = time.perf_counter()
    with subprocess.Popen(FIRST_TEXT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    first_text()  # fetches the model and fills the system's file cache
    taken = {name: [whole_command(c) for _ in range(args.runs)] for name, c in COMMANDS.items()}
    taken["kvern run, first text"] = [first_text() for _ in range(args.runs)]
    bare = statistics.median(taken["python (nothing)"])
    if args.json:
        print(json.dumps(taken))
        return
    print(f"{'command':36} {'median':>8} {'low':>8} {'high':>8} {'x python':>9}")
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        row = f"{median:8.3f} {min(seconds):8.3f} {max(seconds):8.3f} {median / bare:9.1f}"
        print(f"{name:36} {row}")


if __name__ == "__main__":
    main()
