"""What is computed: the cases, their sizes and their prompts, the same for every engine.

Prompts are random token ids, drawn anew for every run, so that no engine finds a prompt of an
earlier run in its cache unless the case wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.errors import UsageError

CASES = {
    "a": "decode, one request",
    "b": "prefill",
    "c": "decode after a long prompt",
    "d": "many requests at once",
    "e": "a shared prompt, computed before",
    "e2": "a shared prompt, all requests at once on an empty cache",
    "sweep": "decode over the length of the context",
    "attend": "attention alone, beside torch's and the bandwidth limit",
    "start": "cold start of `kvern run`",
}
KERNEL_CASE = "attend"
START_CASE = "start"
OTHER_CASES = (KERNEL_CASE, START_CASE)
"""Cases that are not requests to a loaded engine; see `kvern.bench.kernel` and `kvern.bench.start`."""

METRICS = {
    "decode": ("new tokens/s after the first", True),
    "prefill": ("prompt tokens/s", True),
    "throughput": ("new tokens/s over the whole run", True),
    "wall": ("seconds for all requests", False),
}
"""Name of a headline figure: what it counts, and whether more is better."""

_SEED = 20_240
_FIRST_ORDINARY_TOKEN = 100


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the results: requests that arrive together.

    Attributes:
        key: name of the line, ``b-2048``.
        case: the case it belongs to, ``b``.
        num_requests: how many arrive at once.
        shared_tokens: first prompt tokens that all of them have in common.
        own_tokens: further prompt tokens of each.
        new_tokens: tokens that each generates; the model's end tokens do not stop it.
        metric: its headline figure, one of `METRICS`.
        is_warm: whether the shared tokens are computed before the clock starts.
        keeps_cache: whether what earlier items left in the cache may be used.
    """

    key: str
    case: str
    num_requests: int
    shared_tokens: int
    own_tokens: int
    new_tokens: int
    metric: str
    is_warm: bool = False
    keeps_cache: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of each request."""
        return self.shared_tokens + self.own_tokens

    @property
    def request_tokens(self) -> int:
        """Longest context of each request."""
        return self.prompt_tokens + self.new_tokens

    @property
    def title(self) -> str:
        """The work in a few words."""
        prompt = f"{self.own_tokens:,}"
        if self.shared_tokens:
            prompt = f"{self.shared_tokens:,} shared + {self.own_tokens:,} own"
        who = "1 request" if self.num_requests == 1 else f"{self.num_requests} requests"
        return f"{CASES[self.case]}: {who} of {prompt} tokens, {self.new_tokens:,} new each"


def items_of(cases: Sequence[str], quick: bool = False) -> list[Item]:
    """The items of the asked cases, in the order of `CASES`.

    Args:
        cases: names from `CASES`.
        quick: tiny sizes that show that everything works; their figures mean nothing.

    Raises:
        UsageError: a case that does not exist.
    """
    for case in cases:
        if case not in CASES:
            raise UsageError(f"case {case!r} is unknown: choose from {', '.join(CASES)}")
    made = _quick_items() if quick else _full_items()
    return [item for item in made if item.case in cases]


def _full_items() -> list[Item]:
    return [
        Item("a", "a", 1, 0, 64, 128, "decode"),
        Item("b-2048", "b", 1, 0, 2048, 1, "prefill"),
        Item("b-7500", "b", 1, 0, 7500, 1, "prefill"),
        Item("c", "c", 1, 0, 7500, 64, "decode"),
        Item("d", "d", 32, 0, 256, 128, "throughput"),
        Item("e", "e", 16, 1500, 50, 32, "wall", is_warm=True),
        Item("e2", "e2", 16, 1500, 50, 32, "wall"),
        *_sweep((64, 128, 256, 512, 1024, 2048, 4096, 8192), 32),
    ]


def _quick_items() -> list[Item]:
    return [
        Item("a", "a", 1, 0, 16, 8, "decode"),
        Item("b-64", "b", 1, 0, 64, 1, "prefill"),
        Item("b-128", "b", 1, 0, 128, 1, "prefill"),
        Item("c", "c", 1, 0, 128, 8, "decode"),
        Item("d", "d", 4, 0, 16, 8, "throughput"),
        Item("e", "e", 4, 64, 8, 4, "wall", is_warm=True),
        Item("e2", "e2", 4, 64, 8, 4, "wall"),
        *_sweep((32, 64, 128), 6),
    ]


def _sweep(lengths: Sequence[int], new_tokens: int) -> list[Item]:
    """Contexts that end at the named lengths, so that the longest fits the model's limit."""
    return [
        Item(f"kv-{n}", "sweep", 1, 0, n - new_tokens, new_tokens, "decode", keeps_cache=True)
        for n in lengths
    ]


def split_fitting(items: Sequence[Item], max_model_len: int | None) -> tuple[list[Item], list[str]]:
    """The items that a model's context can hold, and a sentence for each that it cannot."""
    limit = max_model_len or 2**31
    left_out = [
        f"{item.key} needs a context of {item.request_tokens:,} tokens, the model's limit is {limit:,}"
        for item in items
        if item.request_tokens > limit
    ]
    return [item for item in items if item.request_tokens <= limit], left_out


def most_tokens(items: Sequence[Item]) -> int:
    """Tokens that the largest item holds at once when nothing is shared."""
    return max((item.num_requests * item.request_tokens for item in items), default=64)


def work_of(item: Item, run: int, vocab_size: int) -> dict[str, Any]:
    """One run of an item as a worker is told.

    Args:
        item: see there.
        run: counts from 0; every run has other prompts.
        vocab_size: of the model.

    Returns:
        ``item``; ``requests``: a list of ``{"prompt": token ids, "max_tokens": n}``; ``shared``: how many
        first tokens they have in common; ``warm``: token ids that are computed before the clock starts,
        empty for none; ``keep_cache``.
    """
    shared = _tokens((run, 0), item.shared_tokens, vocab_size, _key_number(item))
    requests = []
    for index in range(item.num_requests):
        own = _tokens((run, 1 + index), item.own_tokens, vocab_size, _key_number(item))
        requests.append({"prompt": [*shared, *own], "max_tokens": item.new_tokens})
    return {
        "item": item.key,
        "requests": requests,
        "shared": item.shared_tokens,
        "warm": shared if item.is_warm else [],
        "keep_cache": item.keeps_cache,
    }


def _key_number(item: Item) -> int:
    """Sets items apart; those of the sweep begin alike, so that each continues the one before."""
    key = item.case if item.keeps_cache else item.key
    return int.from_bytes(key.encode(), "big")


def _tokens(place: tuple[int, int], count: int, vocab_size: int, key: int) -> list[int]:
    """The first ``count`` tokens of an endless sequence that belongs to the place."""
    if count == 0:
        return []
    low = min(_FIRST_ORDINARY_TOKEN, vocab_size // 2)
    rng = np.random.default_rng([_SEED, key, *place])
    drawn: npt.NDArray[np.float64] = rng.random(count)
    ids: list[int] = (low + np.floor(drawn * (vocab_size - low))).astype(int).tolist()
    return ids
