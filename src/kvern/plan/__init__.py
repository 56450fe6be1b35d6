"""The capacity planner: what fits, exactly, before anything is allocated.

Standard library and `kvern.spec` only. `plan(request)` answers one question for one engine and
version; engines are modules of `kvern.plan.engines`, their rules are versioned data.
"""

from kvern.plan.capacity import plan
from kvern.plan.devices import Device, find_device, load_devices
from kvern.plan.request import ExtraCache, PlanRequest
from kvern.plan.result import Group, Plan, Pool, RankPlan

__all__ = [
    "Device",
    "ExtraCache",
    "Group",
    "Plan",
    "PlanRequest",
    "Pool",
    "RankPlan",
    "find_device",
    "load_devices",
    "plan",
]
