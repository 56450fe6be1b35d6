"""What real engines printed at start-up, against the planner: every record must match."""

from __future__ import annotations

from typing import Any

import pytest
from tests.plan.records import RECORDS, load_records, mismatches

records = load_records()
pytestmark = pytest.mark.skipif(not records, reason=f"no start-up records at {RECORDS}")


@pytest.mark.parametrize("record", records, ids=[record["id"] for record in records])
def test_record_matches(record: dict[str, Any]) -> None:
    assert mismatches(record) == []
