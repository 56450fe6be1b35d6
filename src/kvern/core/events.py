"""What happens to cached content, for whoever wants to follow it: routers, tiers, dashboards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Whole spans became available to later requests, in at least one KV group.

    Partial leaves, which are only copied from, are not told.

    Attributes:
        hashes: 16-byte chain hash of each span, in order.
        parent_hash: of the span before the first; the root hash for a prefix's first span.
        token_ids: tokens of all spans together.
        span_tokens: tokens per span.
    """

    hashes: tuple[bytes, ...]
    parent_hash: bytes
    token_ids: tuple[int, ...]
    span_tokens: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks of whole spans were replaced or dropped in one KV group.

    Attributes:
        hashes: hash of the span that each block belonged to.
        group: the KV group.
    """

    hashes: tuple[bytes, ...]
    group: int


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Everything that nobody held was dropped."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared
Subscriber = Callable[[CacheEvent], None]


class EventBus:
    """Hands cache events to its subscribers in order; free of cost without any."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def __bool__(self) -> bool:
        return bool(self._subscribers)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every event from now on; the result ends the subscription."""
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    def publish(self, event: CacheEvent) -> None:
        """Tell all subscribers."""
        for subscriber in tuple(self._subscribers):
            subscriber(event)
