"""What a caller may ask of one request; every value is checked here, once, with a sentence that helps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvern.errors import InputError

MAX_LOGPROBS = 100


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
        stop: strings that end the answer; they are not part of it.
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
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: frozenset[int] | tuple[int, ...] | list[int] = field(default_factory=frozenset)
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
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))
        self._check_counts()
        self._check_reals()
        if any(not isinstance(s, str) or not s for s in stop):
            raise InputError("every stop string needs at least one character: remove the empty one")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise InputError(f"cache_salt is {self.cache_salt!r}: it must be a string")

    def _check_counts(self) -> None:
        limits: tuple[tuple[str, int | None, int, int | None], ...] = (
            ("max_tokens", self.max_tokens, 1, None),
            ("top_k", self.top_k, 0, None),
            ("n", self.n, 1, 1024),
            ("beam_width", self.beam_width, 1, 64),
            ("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            ("priority", self.priority, -(2**31), 2**31 - 1),
            ("seed", self.seed, -(2**63), 2**64 - 1),
        )
        for name, value, low, high in limits:
            if value is None and name in ("max_tokens", "logprobs", "seed"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(f"{name} is {value!r}: it must be a whole number")
            if value < low or (high is not None and value > high):
                allowed = f"at least {low}" if high is None else f"from {low} to {high}"
                raise InputError(f"{name} is {value}: it must be {allowed}")
        if self.beam_width > 1 and (self.n > 1 or self.temperature > 0):
            raise InputError(
                "beam search is deterministic: leave n at 1 and temperature at 0 with beam_width"
            )

    def _check_reals(self) -> None:
        limits: tuple[tuple[str, float, float, float], ...] = (
            ("temperature", self.temperature, 0.0, math.inf),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("length_penalty", self.length_penalty, -math.inf, math.inf),
            ("presence_penalty", self.presence_penalty, -math.inf, math.inf),
            ("frequency_penalty", self.frequency_penalty, -math.inf, math.inf),
        )
        for name, value, low, high in limits:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or not low <= value <= high:
                allowed = f"from {low:g} to {high:g}" if math.isfinite(low + high) else "finite"
                allowed = (
                    "a finite number, at least 0" if low == 0 and high == math.inf else allowed
                )
                raise InputError(f"{name} is {value!r}: it must be {allowed}")
        if self.top_p == 0:
            raise InputError(
                "top_p is 0: it must be above 0, or temperature 0 for the most likely token"
            )
        penalty = self.repetition_penalty
        if not isinstance(penalty, int | float) or not 0 < penalty < math.inf:
            raise InputError(
                f"repetition_penalty is {penalty!r}: it must be a finite number above 0"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before them in another way than through the model."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
