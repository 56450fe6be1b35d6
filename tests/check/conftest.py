"""A small random model under the doctor; the native kernels where they are built."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import write_tiny_model

from kvern import LLM

MakeEngine = Callable[..., LLM]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("check"))


@pytest.fixture(scope="session")
def engine(small_model: Path) -> Iterator[MakeEngine]:
    """Engines on the small model, made once per combination of settings."""
    made: dict[tuple[Any, ...], LLM] = {}

    def make(**options: Any) -> LLM:
        key = tuple(sorted(options.items()))
        if key not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made[key] = LLM(
                    small_model, **{"kv_memory": "1MiB", "max_model_len": 512, **options}
                )
        return made[key]

    yield make
    for llm in made.values():
        llm.close()
