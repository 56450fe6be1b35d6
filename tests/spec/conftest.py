"""Real configurations by their file's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvern.spec import ModelSpec
from kvern.spec.configs import load_model_spec


@pytest.fixture
def load(shared_data: Path) -> Callable[[str], ModelSpec]:
    """Describes ``shared/data/model_configs/NAME.json``."""

    def load_config(name: str) -> ModelSpec:
        return load_model_spec(shared_data / "model_configs" / f"{name}.json")

    return load_config
