"""Choosing a backend by name; imports only the one that is used."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

from kvern.errors import UsageError
from kvern.kernels.native import NativeBackend, native_available, native_unavailable_reason
from kvern.kernels.protocol import Backend

LOADED_WHEN_USED = {
    "reference": ("kvern.kernels.reference", "ReferenceBackend"),
    "torch": ("kvern.kernels.torch_backend", "TorchBackend"),
}
"""Module and class of the backends whose libraries would slow every start down."""


class SlowBackendWarning(UserWarning):
    """The reference kernels run because the native ones are not there."""


def make_backend(name: str, threads: int | None) -> Backend:
    """A backend.

    Args:
        name: ``auto``, ``native``, ``reference`` or ``torch``.
        threads: None for one per core that this process may use.

    Raises:
        UsageError: the backend is not installed; says how to get it.
    """
    if name == "auto":
        if native_available():
            return NativeBackend(threads)
        warnings.warn(
            f"the reference kernels run, which is slow: {native_unavailable_reason()}",
            SlowBackendWarning,
            stacklevel=2,
        )
        return _load("reference", threads)
    if name == "native":
        if not native_available():
            raise UsageError(
                f"the native backend is not there: {native_unavailable_reason()}; "
                "--backend reference works everywhere"
            )
        return NativeBackend(threads)
    if name == "torch" and importlib.util.find_spec("torch") is None:
        raise UsageError("the torch backend needs torch: install kvern[torch]")
    return _load(name, threads)


def _load(name: str, threads: int | None) -> Backend:
    module, backend = LOADED_WHEN_USED[name]
    made: Backend = getattr(importlib.import_module(module), backend)(threads)
    return made
