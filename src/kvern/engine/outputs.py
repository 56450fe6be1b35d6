"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass

from kvern.core.miss import MissReport


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One new token's log-probability and the most likely alternatives.

    Attributes:
        top: (token id, text, natural log-probability), best first.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one request.

    Attributes:
        queue_s: from arrival until its first token was scheduled.
        ttft_s: from arrival until its first new token.
        tpot_s: mean time per token after the first; 0 with fewer than two.
        e2e_s: from arrival until it was complete.
    """

    queue_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample.

    Attributes:
        index: 0 .. n-1.
        text: the answer, without stop strings and special tokens.
        token_ids: all new tokens, an end token included.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        logprobs: one per token when they were asked for.
        score: a beam's length-normalised log-probability; None for a sample.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request; `text`, `token_ids`, `finish_reason` and `logprobs` are those of the first choice.

    Attributes:
        prompt: the text, when it was given as text.
        cached_tokens: prompt tokens found in the cache.
        miss: what was found on which tier and why not more; None when it never started.
        seed: what the samples were drawn with; asking again with it gives them again.
        num_preemptions: how often it lost its blocks and was recomputed.
        error: why it failed; None unless finish_reason is ``error``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    cached_tokens: int
    miss: MissReport | None
    timing: Timing
    seed: int
    num_preemptions: int = 0
    error: str | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's tokens."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The first choice's log-probabilities, when asked for."""
        return self.choices[0].logprobs

    @property
    def num_completion_tokens(self) -> int:
        """New tokens over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """A piece of a streaming answer.

    Attributes:
        index: which choice grew.
        text: new text, possibly empty (half a character, or what might become a stop string, is held back).
        token_ids: the tokens behind it.
        finish_reason: set on a choice's last piece.
        output: the whole result, on the request's last piece only.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    output: RequestOutput | None = None


@dataclass(frozen=True, slots=True)
class Pin:
    """A held prefix.

    Attributes:
        num_tokens: how many tokens of the prompt are held.
    """

    pin_id: int
    num_tokens: int
