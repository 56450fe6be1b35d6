"""`kvern --version`: the version, and which kernels answer on this machine."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

import kvern
from kvern._version import __version__
from kvern.cli.output import print_json

_NATIVE = "kvern.kernels._native"

REBUILD = (
    "install a C++17 compiler, then in a checkout of kvern: "
    "KVERN_REQUIRE_NATIVE=1 pip install --force-reinstall --no-deps ."
)


def describe() -> dict[str, Any]:
    """Version, backend and kernel path; looks at the native module without loading numpy."""
    kernel_path, problem = _native_kernel_path()
    return {
        "version": __version__,
        "backend": "reference" if kernel_path is None else "native",
        "native": kernel_path is not None,
        "kernel_path": kernel_path or "none",
        "native_problem": problem,
        "rebuild": REBUILD,
        "python": platform.python_version(),
        "machine": f"{sys.platform}-{platform.machine()}",
        "location": str(_package_folder()),
    }


def print_version(*, as_json: bool) -> None:
    """Prints what `describe` finds."""
    about = describe()
    if as_json:
        print_json(about)
        return
    print(f"kvern {about['version']}")
    if about["native"]:
        print(f"backend native, kernels {about['kernel_path']}")
        return
    print(f"backend reference (numpy, slow): {about['native_problem']}")
    print(f"for the native kernels {about['rebuild']}")


def _package_folder() -> Path:
    return Path(kvern.__path__[0])


def _native_kernel_path() -> tuple[str | None, str | None]:
    """The instruction sets that the native kernels use here, or None and why there are none."""
    folder = _package_folder() / "kernels"
    spec = importlib.machinery.PathFinder.find_spec(_NATIVE, [str(folder)])
    if spec is None or spec.loader is None:
        return None, "the native kernels were not built when kvern was installed"
    try:
        module = sys.modules.get(_NATIVE)
        if module is None or module.__file__ != spec.origin:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[_NATIVE] = module
        chosen = os.environ.get("KVERN_KERNEL_PATH", "")  # as the native backend chooses
        return chosen or str(module.available_paths()[0]), None
    except (ImportError, AttributeError) as error:
        return None, f"the native kernels do not load ({error})"
