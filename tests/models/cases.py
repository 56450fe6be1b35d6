"""The small models that the families are tested with; each has every layer kind of its family."""

from __future__ import annotations

from tests.models.cases_dense import DENSE
from tests.models.cases_experts import EXPERT_CASES
from tests.models.cases_hybrid import HYBRID
from tests.models.cases_legacy import LEGACY

CASES = [*DENSE, *EXPERT_CASES, *LEGACY, *HYBRID]

IDS = [case.family for case in CASES]
