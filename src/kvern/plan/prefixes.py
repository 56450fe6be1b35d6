"""Shared and retained prefixes: unique physical blocks are counted, not logical ones.

Requests that begin alike share whole blocks; the block in which they part is each request's own.
Prefixes that stay cached between requests hold blocks although nobody runs on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvern.errors import CapacityError, UsageError


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What prefixes do to the number of requests.

    Attributes:
        shared_blocks: blocks of the shared prefix, stored once.
        own_blocks: further blocks of each request.
        retained_blocks: blocks that idle prefixes hold.
        requests, requests_without: how many fit with and without sharing and retaining.
    """

    shared_tokens: int
    shared_blocks: int
    own_blocks: int
    retained_count: int
    retained_tokens: int
    retained_blocks: int
    requests: int
    requests_without: int


def parse_retained(text: str) -> tuple[int, int]:
    """Reads "200x1500": how many prefixes, tokens of each.

    Raises:
        UsageError: not of that form.
    """
    count, _, tokens = text.lower().partition("x")
    if not (count.strip().isdigit() and tokens.strip().isdigit()) or int(tokens) < 1:
        raise UsageError(f"--retained-prefixes {text!r} is not of the form COUNTxTOKENS")
    return int(count), int(tokens)


def plan_prefixes(
    blocks_of: Callable[[int], int],
    growing_blocks_of: Callable[[int], int],
    pool_blocks: int,
    context: int,
    shared_tokens: int,
    retained: tuple[int, int] = (0, 0),
) -> PrefixPlan:
    """Counts requests of `context` tokens that begin with the same `shared_tokens`.

    Args:
        blocks_of: blocks of a whole request of a length.
        growing_blocks_of: blocks of a length that can be shared: whole ones of growing groups.
        pool_blocks: blocks that requests and prefixes can use.
        context: tokens of each request, prefix included.
        shared_tokens: tokens of the common prefix.
        retained: number of idle prefixes, and tokens of each.

    Raises:
        UsageError: the prefix is as long as the request.
        CapacityError: retained prefixes alone fill the pool.
    """
    if shared_tokens >= context:
        raise UsageError(
            f"--shared-prefix {shared_tokens:,} leaves nothing of a request of {context:,} tokens: "
            "give a longer --context"
        )
    shared = growing_blocks_of(shared_tokens)
    own = blocks_of(context) - shared
    count, tokens = retained
    held = count * growing_blocks_of(tokens)
    left = pool_blocks - shared - held
    if left < own:
        raise CapacityError(
            f"{count:,} retained prefixes of {tokens:,} tokens and the shared one hold "
            f"{shared + held:,} of {pool_blocks:,} blocks, and a request needs {own:,} more: "
            "retain fewer"
        )
    return PrefixPlan(
        shared_tokens=shared_tokens,
        shared_blocks=shared,
        own_blocks=own,
        retained_count=count,
        retained_tokens=tokens,
        retained_blocks=held,
        requests=left // max(own, 1),
        requests_without=pool_blocks // max(blocks_of(context), 1),
    )
