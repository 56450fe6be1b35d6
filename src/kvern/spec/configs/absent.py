"""What a field that a `config.json` leaves out means, where that is not simply "none".

One table for the cache's description and for the decoders, so that both read a folder the same way.
A field that is stated, be it as null, is never changed. The values are those of the configuration
classes of transformers, which the test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

ABSENT_FIELDS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "mistral": MappingProxyType({"sliding_window": 4096}),
        "ministral": MappingProxyType({"sliding_window": 4096}),
    }
)
"""By `model_type`: fields and what their absence means."""


def with_absent_fields(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a configuration and those that its model type implies."""
    implied = ABSENT_FIELDS.get(str(values.get("model_type")), {})
    return {**implied, **values} if implied else values
