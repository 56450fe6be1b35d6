"""The one exception hierarchy: every refusal is a `KvernError` with one clear sentence.

Exit codes and HTTP statuses are properties of the class, mapped once by the command line and once
by the server.
"""

from __future__ import annotations


class KvernError(Exception):
    """Base of every error that kvern raises on purpose.

    Attributes:
        exit_code: what a command exits with (1 unless the usage itself was wrong).
        http_status: what the server answers with.
    """

    exit_code: int = 1
    http_status: int = 500


class UsageError(KvernError):
    """The command line or an option is wrong; nothing was attempted."""

    exit_code = 2
    http_status = 400


class InputError(KvernError):
    """The request itself cannot be served: empty or too long prompt, invalid parameter."""

    http_status = 400


class CapacityError(InputError):
    """The request can never fit into the pool or the model's context, whatever else finishes."""


class ModelError(KvernError):
    """The model cannot be used: missing, damaged, incomplete or unknown."""

    http_status = 400


class FileFormatError(ModelError):
    """A file is not what its name says: truncated, corrupt, or with absurd lengths."""


class UnsupportedModelError(ModelError):
    """The model is well-formed, and kvern has no decoder or no cache description for it."""


class FetchError(KvernError):
    """A model could not be fetched: no network, wrong checksum, not enough disk."""

    http_status = 503


class IntegrityError(KvernError):
    """An invariant of the cache does not hold; the sentence names it and the numbers."""
