"""The portable path built for 64-bit ARM and run under emulation: bit for bit what it computes here."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = Path(__file__).with_name("portable_check.cpp")
CROSS = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
LIBRARY_ERROR = 1e-6
"""Of the exact GELU between two C libraries, whose erfc may each be wrong by some units in the last place."""


def cmake_list(name: str) -> list[str]:
    """The words that CMakeLists.txt sets a variable to."""
    found = re.search(
        rf"^set\({name}\s+([^)]*)\)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE
    )
    assert found, f"CMakeLists.txt sets no {name}"
    return found[1].split()


def run(command: Sequence[str | Path], timeout: float = 300) -> str:
    """The command's output; what it says on stderr (a compiler's warnings) fails the test."""
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0 and not done.stderr, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def build(compiler: str, folder: Path, extra: Sequence[str] = ()) -> Path:
    """The check program and the kernels, with the project's own flags, in one static program."""
    flags = ["-std=c++17", *cmake_list("kernel_flags"), *extra, "-pthread", f"-I{ROOT / 'csrc'}"]
    folder.mkdir()

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        run([compiler, *flags, "-c", source, "-o", target])
        return target

    # The longest first: it is half of the work.
    sources = sorted(
        (ROOT / s for s in cmake_list("kernel_sources")), key=lambda s: s.stem != "path_portable"
    )
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, [sources[0], CHECK, *sources[1:]]))
    program = folder / "check"
    run([compiler, "-static", "-pthread", *objects, "-o", program])
    return program


def results(text: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Hashes by name, and numbers of what need not be the same to the last bit."""
    hashes, near = {}, {}
    for line in text.splitlines():
        if line.startswith("near "):
            _, name, *numbers = line.split()
            near[name] = np.array([float.fromhex(n) for n in numbers])
        else:
            name, hashes_to = line.rsplit(maxsplit=1)
            hashes[name] = hashes_to
    return hashes, near


@pytest.mark.full
@pytest.mark.long
def test_arm_computes_the_same_bits(tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(
            "comparing with 64-bit ARM needs an x86-64 machine; on ARM the kernels' other tests run themselves"
        )
    native = os.environ.get("CXX", "c++")
    for tool in (CROSS, native):
        if shutil.which(tool) is None:
            pytest.skip(f"building the portable kernels for both processors needs {tool}")
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if emulator is None:
        pytest.skip(f"running 64-bit ARM programs needs one of {', '.join(EMULATORS)}")
    expected, expected_near = results(run([build(native, tmp_path / "native", ["-O1"])]))
    actual, actual_near = results(run([emulator, build(CROSS, tmp_path / "arm")]))
    assert len(expected) > 150 and len(expected_near) == 3
    assert actual == expected
    assert actual_near.keys() == expected_near.keys()
    for name, numbers in expected_near.items():
        np.testing.assert_allclose(actual_near[name], numbers, rtol=LIBRARY_ERROR, err_msg=name)
