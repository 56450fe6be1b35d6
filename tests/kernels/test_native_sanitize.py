"""The extension's tests again, on a build with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kvern.kernels._native", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
import kvern.kernels.native as native
assert native._native is module
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def sanitizer_library(name: str) -> str:
    """Path of a sanitizer's run-time library, as the compiler knows it."""
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return str(Path(found.stdout.strip()).resolve())


@pytest.mark.full
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizers as Linux does")
def test_the_extension_under_sanitizers(tmp_path: Path) -> None:
    pytest.importorskip("nanobind", reason="building the extension needs nanobind")
    for tool in ("cmake", os.environ.get("CXX", "c++")):
        if shutil.which(tool) is None:
            pytest.skip(f"building the extension needs {tool}")
    build = tmp_path / "build"
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-DKVERN_SANITIZE=ON"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DKVERN_MODULE_DIR={build}"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(build), "-j", "2"], check=True, capture_output=True)
    module = next(build.glob("_native*.so"))
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    environment = os.environ | {
        "LD_PRELOAD": f"{sanitizer_library('libasan.so')}:{sanitizer_library('libubsan.so')}",
        # The interpreter never frees all it allocates, and forks on purpose.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=77",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",
        "KVERN_REQUIRE_NATIVE": "1",
    }
    tests = sorted(
        str(p) for p in Path(__file__).parent.glob("test_native_*.py") if p != Path(__file__)
    )
    run = subprocess.run(
        [sys.executable, str(driver), str(module), "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert "runtime error" not in run.stderr
