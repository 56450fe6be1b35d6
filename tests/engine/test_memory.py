"""What a process with the default model holds at its peak, measured from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ALLOWANCE = 200 * 2**20
"""Python, libraries, tokenizer, activations and logits together."""

PROGRAM = """
import json, sys
from kvern import LLM, SamplingParams
with LLM(sys.argv[1], backend="native", kv_memory="64MiB", threads=2) as llm:
    prompts = [list(range(10 * i, 10 * i + 300)) for i in range(1, 9)]
    llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    with open("/proc/self/status") as status:  # ru_maxrss would be the parent's before exec
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    model = llm.model
    print(json.dumps({"peak": peak, "weights": model.weights.nbytes, "pool": model.store.nbytes}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' /proc")
@pytest.mark.usefixtures("require_native")
def test_peak_memory_is_weights_plus_pool_plus_an_allowance(smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(smollm2_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout)
    assert seen["pool"] <= 64 * 2**20
    assert seen["peak"] <= seen["weights"] + seen["pool"] + ALLOWANCE
