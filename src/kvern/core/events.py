"""What happens to cached content, for whoever wants to follow it: routers, tiers, dashboards."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger(__name__)


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
    """Hands cache events to its subscribers in order; free of cost without any.

    Events are queued where they arise and delivered once the change they belong to is complete, so a
    subscriber finds sound bookkeeping. One that raises is logged and dropped: it is its own problem.
    """

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []
        self._queue: deque[CacheEvent] = deque()
        self._is_delivering = False

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
        """Queue an event for all subscribers."""
        self._queue.append(event)

    def deliver(self) -> None:
        """Tell all subscribers what is queued; events that they cause themselves come last."""
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._queue:
                event = self._queue.popleft()
                for subscriber in tuple(self._subscribers):
                    self._tell(subscriber, event)
        finally:
            self._is_delivering = False

    def _tell(self, subscriber: Subscriber, event: CacheEvent) -> None:
        try:
            subscriber(event)
        except Exception:
            _log.exception(
                "a subscriber to cache events failed at %s and gets no more of them",
                type(event).__name__,
            )
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)
