"""Cold start: `kvern run` of one short answer, from the start of its process to the first text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvern.bench.results import spread_document
from kvern.bench.stats import spread_of

QUESTION = "Hello, who are you?"
NEW_TOKENS = "4"
TIMEOUT_S = 300.0


def cold_start(
    model: Path, threads: int, runs: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Measure it; the model's file may lie in the system's memory, as after a first use.

    Returns:
        ``seconds``: a spread; ``load_s`` and ``ttft_s``: the parts that one run told of itself, the rest
        being the interpreter, imports and the command line. Or ``error``: why there is no figure.
    """
    command = [sys.executable, "-m", "kvern", "run", "--model", str(model), QUESTION]
    command += ["--max-tokens", NEW_TOKENS, "--threads", str(threads)]
    variables = {**os.environ, **environment}
    told = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, env=variables, timeout=TIMEOUT_S
    )
    if told.returncode != 0:
        return {"error": " ".join(told.stderr.split())}
    timing = json.loads(told.stdout)["timing"]
    seconds = [_seconds_to_first_byte(command, variables) for _ in range(runs)]
    return {
        "seconds": spread_document(spread_of(seconds)),
        "load_s": timing["load_s"],
        "ttft_s": timing["ttft_s"],
    }


def _seconds_to_first_byte(command: list[str], variables: Mapping[str, str]) -> float:
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    return seconds
