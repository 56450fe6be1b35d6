"""What the planner answers; field names follow `plan --json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvern.plan.request import PlanRequest

FAR = 2**24
"""Tokens over which the cost of a further token is averaged, so that blocks do not show."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of one rank before KV.

    Attributes:
        kv_bytes: what is left for KV; None where the pool was given in blocks or tokens.
        parts: the sum's other terms, by name, for the explanation.
    """

    rank: int
    stage: int
    weights_bytes: int | None
    reserve_bytes: int
    kv_bytes: int | None
    total_bytes: int | None = None
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's share."""

    rank: int
    stage: int
    num_layers: int
    weights_bytes: int | None
    reserve_bytes: int
    kv_budget_bytes: int
    num_blocks: int
    kv_used_bytes: int
    block_bytes: int

    @property
    def unused_bytes(self) -> int:
        """Budget left over: rounding, and blocks that another rank cannot match."""
        return self.kv_budget_bytes - self.kv_used_bytes

    def to_json(self) -> dict[str, Any]:
        """Its entry in `per_rank`."""
        return {
            "rank": self.rank,
            "stage": self.stage,
            "layers": self.num_layers,
            "weights_bytes": self.weights_bytes,
            "reserve_bytes": self.reserve_bytes,
            "kv_budget_bytes": self.kv_budget_bytes,
            "num_blocks": self.num_blocks,
            "kv_used_bytes": self.kv_used_bytes,
            "block_bytes": self.block_bytes,
        }


@dataclass(frozen=True, slots=True)
class Pool:
    """A separately sized allocation, as the engine prints it (per rank).

    Attributes:
        cells: token slots of a stream, or state slots, as the engine counts them.
        streams: equal copies of the cells (llama.cpp gives each sequence its own).
        parts: finer figures an engine prints, e.g. conv and ssm bytes of a state pool.
    """

    name: str
    layers: int
    cells: int
    k_bytes: int = 0
    v_bytes: int = 0
    state_bytes: int = 0
    streams: int = 1
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total_cells(self) -> int:
        """Cells of all streams."""
        return self.cells * self.streams

    @property
    def bytes(self) -> int:
        """All bytes of the pool."""
        return self.k_bytes + self.v_bytes + self.state_bytes

    def to_json(self) -> dict[str, Any]:
        """Its entry in `pools`."""
        return {
            "name": self.name,
            "layers": self.layers,
            "cells": self.cells,
            "streams": self.streams,
            "k_bytes": self.k_bytes,
            "v_bytes": self.v_bytes,
            "state_bytes": self.state_bytes,
            "bytes": self.bytes,
            "parts": self.parts,
        }


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table, and what one request takes of the pool for them.

    Attributes:
        padding_layers: layers that exist only to make groups equal; their memory is real.
        page_bytes: bytes of one layer's page.
        page_waste_bytes: bytes of it that hold nothing.
    """

    name: str
    kind: str
    num_layers: int
    block_size: int
    page_bytes: int
    blocks_per_request: int
    padding_layers: int = 0
    page_waste_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Its entry in `groups`."""
        return {
            "name": self.name,
            "kind": self.kind,
            "layers": self.num_layers,
            "padding_layers": self.padding_layers,
            "block_size": self.block_size,
            "page_bytes": self.page_bytes,
            "page_waste_bytes": self.page_waste_bytes,
            "blocks_per_request": self.blocks_per_request,
        }


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the explanation: what, the formula with its numbers, the result."""

    title: str
    formula: str
    result: str

    def __str__(self) -> str:
        return f"{self.title} = {self.formula} = {self.result}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """What an engine module works out.

    Attributes:
        num_blocks: blocks of each rank's pool, in rank order, before the minimum.
        block_bytes: bytes of a block on each rank.
        longest_context: the longest request that fits the pool, the model's limit not applied.
        blocks_per_request: blocks of one request of the asked length, over all groups.
        request_bytes: bytes that one request of a length takes on the rank that takes most.
        usable_blocks: blocks of the pool that requests can hold.
        blocks_of: blocks that a request of a length holds at most.
        shared_blocks_of: whole blocks of a prefix that other requests can share.
    """

    block_size: int
    block_bytes: tuple[int, ...]
    num_blocks: tuple[int, ...]
    capacity_tokens: int
    max_concurrency: float
    longest_context: int
    bytes_for_context: int
    fits: bool
    pools: tuple[Pool, ...]
    groups: tuple[Group, ...]
    blocks_per_request: int
    steps: tuple[Step, ...]
    used_bytes: tuple[int, ...]
    request_bytes: Callable[[int], int]
    usable_blocks: int
    blocks_of: Callable[[int], int]
    shared_blocks_of: Callable[[int], int]
    assumptions: tuple[str, ...] = ()
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole answer to one request."""

    request: PlanRequest
    engine: str
    engine_version: str
    per_rank: tuple[RankPlan, ...]
    tightest_rank: int
    allocation: Allocation
    context: int
    explanation: tuple[Step, ...]
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool: the tightest rank's."""
        return self.per_rank[self.tightest_rank].num_blocks

    @property
    def request_cost(self) -> tuple[int, float]:
        """Cost of a request in two parts: fixed bytes, and bytes per token beyond the windows."""
        per_request = self.allocation.request_bytes
        growth = per_request(self.context + FAR) - per_request(self.context)
        per_token = growth / FAR
        return max(round(per_request(self.context) - per_token * self.context), 0), per_token

    @property
    def max_model_len(self) -> int:
        """The longest request the pool holds, at most the model's own limit."""
        limit = self.request.model.max_model_len
        longest = self.allocation.longest_context
        return longest if limit is None else min(longest, max(limit, self.context))

    def with_warnings(self, warnings: tuple[str, ...]) -> Plan:
        """The same plan with its warnings filled in."""
        return replace(self, warnings=warnings)

    def to_json(self) -> dict[str, Any]:
        """The object that `plan --json` prints."""
        a = self.allocation
        fixed, per_token = self.request_cost
        return {
            "model": self.request.model.name,
            "engine": self.engine,
            "engine_version": self.engine_version,
            "context": self.context,
            "per_rank": [rank.to_json() for rank in self.per_rank],
            "tightest_rank": self.tightest_rank,
            "pools": [pool.to_json() for pool in a.pools],
            "groups": [group.to_json() for group in a.groups],
            "block_size": a.block_size,
            "block_bytes": a.block_bytes[self.tightest_rank],
            "num_blocks": self.num_blocks,
            "blocks_per_request": a.blocks_per_request,
            "capacity_tokens": a.capacity_tokens,
            "max_concurrency": a.max_concurrency,
            "replicas": self.request.dp,
            "max_model_len": self.max_model_len,
            "bytes_for_context": a.bytes_for_context,
            "request_fixed_bytes": fixed,
            "request_bytes_per_token": per_token,
            "fits": a.fits,
            **a.extras,
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
            "explanation": [str(step) for step in self.explanation],
        }
