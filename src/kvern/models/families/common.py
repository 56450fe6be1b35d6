"""Reading configuration fields so that a missing or wrong one is named."""

from __future__ import annotations

from kvern.errors import ModelError
from kvern.models.config import Config


def integer(config: Config, field: str) -> int:
    """A positive integer field that must be there."""
    value = config.get(field)
    if value is None:
        raise ModelError(f"the configuration lacks the field {field!r}, which the decoder needs")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"configuration field {field!r} is {value!r}, not a positive integer")
    return value


def optional_integer(config: Config, field: str, default: int) -> int:
    """A positive integer field, or its default when absent or null."""
    return default if config.get(field) is None else integer(config, field)


def number(config: Config, field: str, default: float) -> float:
    """A real field, or its default when absent or null."""
    value = config.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"configuration field {field!r} is {value!r}, not a number")
    return float(value)
