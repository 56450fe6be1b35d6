"""What a caller may ask of one request; every value is checked here, once, with a sentence that helps."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsFloat, SupportsIndex, cast

from kvern.errors import InputError

MAX_LOGPROBS = 100

_COUNTS: tuple[tuple[str, int, int | None], ...] = (
    ("max_tokens", 1, None),
    ("top_k", 0, None),
    ("n", 1, 1024),
    ("beam_width", 1, 64),
    ("logprobs", 0, MAX_LOGPROBS),
    ("priority", -(2**31), 2**31 - 1),
    ("seed", -(2**63), 2**64 - 1),
)
"""Whole numbers and their limits."""

_REALS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("length_penalty", -math.inf, math.inf),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
)
"""Real numbers and their limits; penalties beyond theirs only produce noise."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Attributes:
        max_tokens: new tokens at most; None: as many as the context and the pool allow.
        temperature: 0 is greedy (the lowest id wins a tie); otherwise logits are divided by it.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one.
        seed: the same seed gives the same tokens on the same machine, whatever else runs; None: drawn once
            per request and reported.
        stop: a string, or several, that end the answer; they are not part of it.
        stop_token_ids: token ids that end the answer, beside the model's own end tokens.
        ignore_eos: do not stop at the model's end tokens.
        n: samples per prompt; they share the prompt's blocks. Sample i draws as a request of its own
            with seed `kvern.engine.sampler.derived_seed(seed, i)` would.
        beam_width: beam search with this many beams; 1 is off.
        length_penalty: a finished beam's log-probability is divided by length ** length_penalty.
        logprobs: for each new token its log-probability and that of this many most likely ones; None: none.
            They are of the model's own distribution, before penalties, temperature and truncation.
        repetition_penalty: positive logits of tokens seen in prompt or answer are divided by it, negative
            ones multiplied; 1 is off.
        presence_penalty: subtracted once from the logit of each token in the answer.
        frequency_penalty: subtracted per occurrence in the answer.
        cache_salt: requests with different salts never share cached blocks.
        priority: lower runs earlier; equal priorities in order of arrival.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Iterable[str] | str | None = ()
    stop_token_ids: Iterable[int] | None = frozenset()
    ignore_eos: bool = False
    n: int = 1
    beam_width: int = 1
    length_penalty: float = 1.0
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    cache_salt: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        """Normalise and check.

        Raises:
            InputError: names the field, its value and what is allowed.
        """
        stop = _tuple_of("stop", self.stop, str)
        if "" in stop:
            raise InputError("every stop string needs at least one character: remove the empty one")
        self._set("stop", stop)
        ids = _tuple_of("stop_token_ids", self.stop_token_ids, int)
        if any(token < 0 for token in ids):
            raise InputError(f"stop_token_ids {sorted(ids)} has a negative token id")
        self._set("stop_token_ids", frozenset(ids))
        for name, least, most in _COUNTS:
            self._check_count(name, least, most)
        for name, low, high in _REALS:
            self._check_real(name, low, high)
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos is {self.ignore_eos!r}: it must be true or false")
        self._check_salt()
        self._check_combinations()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_count(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if value is None and name in ("max_tokens", "logprobs", "seed"):
            return
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise InputError(f"{name} is {value!r}: it must be a whole number")
        value = operator.index(value)
        if value < low or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"from {low} to {high}"
            raise InputError(f"{name} is {value}: it must be {allowed}")
        self._set(name, value)

    def _check_real(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, SupportsFloat) and not isinstance(value, bool | str)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            allowed = f"from {low:g} to {high:g}"
            if high == math.inf:
                allowed = "a finite number" + (f", at least {low:g}" if low == 0 else "")
            raise InputError(f"{name} is {value!r}: it must be {allowed}")
        self._set(name, float(value))

    def _check_salt(self) -> None:
        salt = self.cache_salt
        if salt is None:
            return
        if not isinstance(salt, str):
            raise InputError(f"cache_salt is {salt!r}: it must be a string")
        if any("\ud800" <= character <= "\udfff" for character in salt):
            raise InputError(
                f"cache_salt {salt!r} is not valid Unicode text: it has a lone surrogate"
            )

    def _check_combinations(self) -> None:
        if self.top_p == 0:
            raise InputError(
                "top_p is 0: it must be above 0, or temperature 0 for the most likely token"
            )
        if self.beam_width == 1:
            return
        if self.n > 1 or self.temperature > 0:
            raise InputError(
                "beam search is deterministic: leave n at 1 and temperature at 0 with beam_width"
            )
        for name, is_given in (
            ("stop strings", bool(self.stop)),
            ("logprobs", self.logprobs is not None),
            ("penalties", self.has_penalties),
        ):
            if is_given:
                raise InputError(
                    f"beam search does not take {name}: leave them out, or beam_width at 1"
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, normalised."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def stop_ids(self) -> frozenset[int]:
        """`stop_token_ids`, normalised."""
        return cast("frozenset[int]", self.stop_token_ids)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before them in another way than through the model."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _tuple_of(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    """None, one value or several of a kind, as a tuple."""
    if values is None:
        return ()
    if isinstance(values, str) or not isinstance(values, Iterable):
        values = (values,)
    listed = tuple(values)
    for value in listed:
        is_kind = isinstance(value, str if kind is str else SupportsIndex)
        if not is_kind or isinstance(value, bool):
            wanted = "strings" if kind is str else "token ids"
            raise InputError(f"{name} holds {value!r}: it takes {wanted}")
    return listed if kind is str else tuple(operator.index(value) for value in listed)
