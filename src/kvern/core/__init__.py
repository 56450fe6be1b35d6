"""Bookkeeping of the cache: pool, tables, prefix index, scheduler. Knows no tensor.

    scheduler = Scheduler(kv_plan, SchedulerConfig(max_num_seqs=32), clock)
    scheduler.add(Request("a", prompt=[1, 2, 3], max_tokens=8))
    while scheduler.has_work:
        plan = scheduler.plan()                      # StepPlan: ops, chunks, started
        result = executor.execute(plan)              # StepResult: samples
        events = scheduler.commit(plan, result)      # or scheduler.discard(plan)

An executor carries out `plan.ops` in order, then computes `plan.chunks` as one batch, reading and
writing the blocks that `chunk.seq.tables` name.
"""

from kvern.core.config import SchedulerConfig
from kvern.core.plan import (
    BlockOp,
    Chunk,
    Copy,
    CopyOpen,
    Event,
    RequestFinished,
    RequestStarted,
    SampleFinished,
    StepPlan,
    StepResult,
    TokenChoice,
    TokenEvent,
    Zero,
)
from kvern.core.scheduler import Scheduler
from kvern.core.sequence import Media, Request, Sequence, Table
from kvern.core.stats import CacheStats, Counters

__all__ = [
    "BlockOp",
    "CacheStats",
    "Chunk",
    "Copy",
    "CopyOpen",
    "Counters",
    "Event",
    "Media",
    "Request",
    "RequestFinished",
    "RequestStarted",
    "SampleFinished",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "StepPlan",
    "StepResult",
    "Table",
    "TokenChoice",
    "TokenEvent",
    "Zero",
]
