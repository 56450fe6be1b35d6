"""Small models, saved once for all tests."""

from __future__ import annotations

from functools import cache

import pytest
from tests.models.cases import CASES
from tests.models.harness import Case, Saved, SavedModels, real_fields


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedModels:
    """The saved model of a case, of the tiny or of the cut real configuration."""

    @cache
    def save(index: int, is_real: bool) -> Saved:
        case = CASES[index]
        fields = real_fields(case) if is_real else None
        return Saved.of(tmp_path_factory.mktemp("model"), case, fields)

    def find(case: Case, is_real: bool = False) -> Saved:
        return save(CASES.index(case), is_real)

    return find
