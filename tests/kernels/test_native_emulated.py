"""The AVX-512 paths on a processor without AVX-512: their tests on a build that emulates the instructions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvern.kernels.native import available_kernel_paths

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
HERE = {Path(__file__).name, "test_native_sanitize.py"}
CHOICE = "not avx2 and not portable and not 144-16"
"""Not the paths that run natively, nor the one test, of 144 heads, that takes longer than all others."""

DRIVER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kvern.kernels._native", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
import kvern.kernels.native as native
assert native._native is module
assert native.available_kernel_paths()[:3] == ("amx", "avx512", "avx512vnni")
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def build_emulated(folder: Path) -> Path:
    """Builds the extension with the instructions emulated; its path."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-DKVERN_EMULATE_AVX512=ON"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DKVERN_MODULE_DIR={folder}"]
    for command in (configure, ["cmake", "--build", str(folder), "-j", "2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return next(folder.glob("_native*.so"))


@pytest.mark.full
@pytest.mark.long
@pytest.mark.usefixtures("require_native")
def test_the_avx512_paths_emulated(tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the emulation is written for x86-64")
    paths = available_kernel_paths()
    if "amx" in paths:
        pytest.skip("this processor runs all of these paths itself: their tests need no emulation")
    if "avx2" not in paths:
        pytest.skip("the emulation needs AVX2, which this processor lacks")
    pytest.importorskip("nanobind", reason="building the extension needs nanobind")
    for tool in ("cmake", os.environ.get("CXX", "c++")):
        if shutil.which(tool) is None:
            pytest.skip(f"building the extension needs {tool}")
    module = build_emulated(tmp_path / "build")
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    tests = sorted(str(p) for p in FOLDER.glob("test_native_*.py") if p.name not in HERE)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", CHOICE]
    run = subprocess.run(
        [sys.executable, str(driver), str(module), *options, *tests],
        cwd=ROOT,
        env=os.environ | {"KVERN_REQUIRE_NATIVE": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert " passed" in run.stdout and " skipped" not in run.stdout, run.stdout[-2000:]
