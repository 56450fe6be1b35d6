"""How the native kernels' threads share out work: a C++ program, built with a check for data races."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = Path(__file__).with_name("shares_check.cpp")


def compiler() -> str:
    """A C++ compiler's name, that of CXX if it is set; without one the test is skipped."""
    for name in [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]:
        ask = [name, "--version"]
        if shutil.which(name) and subprocess.run(ask, capture_output=True).returncode == 0:
            return name
    pytest.skip("needs a C++ compiler")


def test_every_unit_goes_to_one_thread_whoever_comes(tmp_path: Path) -> None:
    program, csrc = tmp_path / "shares", ROOT / "csrc"
    build = [compiler(), "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-pthread", f"-I{csrc}"]
    sources = [CHECK, csrc / "pool.cpp"]

    # These tests also run with another sanitizer preloaded; two in one process cannot be.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(c) for c in command], capture_output=True, text=True, env=env)

    # Some systems lack the library, on some it cannot place its memory; a verdict is a line of the program's.
    watched = run(*build, "-fsanitize=thread", *sources, "-o", program)
    done = run(program) if watched.returncode == 0 else watched
    has_verdict = "right" in done.stdout or "wrong" in done.stdout
    if not has_verdict and "WARNING: ThreadSanitizer: data race" not in done.stderr:
        plain = run(*build, *sources, "-o", program)
        assert plain.returncode == 0, plain.stderr
        done = run(program)
    assert done.returncode == 0 and not done.stderr, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout == "right\n"
