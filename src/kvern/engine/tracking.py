"""From the bookkeeping's events to what callers see: text, stop strings, timing, finished outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvern.core.plan import (
    Event,
    RequestFinished,
    RequestStarted,
    SampleFinished,
    TokenChoice,
    TokenEvent,
)
from kvern.engine.outputs import Choice, RequestOutput, StreamDelta, Timing, TokenLogprob
from kvern.engine.sampler import Sampling
from kvern.text import Detokenizer, StopStrings, Tokenizer

FinishSample = Callable[[str, int, str], None]
"""Ends one sample of a request: (request id, sample index, reason)."""


class SampleText:
    """One sample's growing text; holds back half characters and beginnings of stop strings."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: tuple[int, ...], stops: tuple[str, ...]
    ) -> None:
        """Args: tokenizer: None when the model has none; the text then stays empty."""
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops) if stops else None
        self.text = ""
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now safe to show."""
        if self._detokenizer is None:
            return ""
        return self._filter(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """What was held back."""
        if self._detokenizer is None or self.is_stopped:
            return ""
        rest = self._filter(self._detokenizer.finish())
        if self._stops is not None and not self.is_stopped:
            held = self._stops.finish()
            self.text += held
            rest += held
        return rest

    def _filter(self, delta: str) -> str:
        if self._stops is not None:
            delta, matched = self._stops.push(delta)
            self.is_stopped = matched is not None
        self.text += delta
        return delta


@dataclass(slots=True)
class SampleState:
    """One sample as far as it has come."""

    text: SampleText
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenChoice] = field(default_factory=list)
    finish_reason: str | None = None
    score: float | None = None


@dataclass(slots=True)
class RequestState:
    """One request as far as it has come; times are the injected clock's seconds."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]
    arrived_s: float
    samples: dict[int, SampleState] = field(default_factory=dict)
    deltas: deque[StreamDelta] = field(default_factory=deque)
    started_s: float | None = None
    first_token_s: float | None = None
    error: str | None = None
    output: RequestOutput | None = None


class Tracker:
    """All live requests of an engine."""

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float]) -> None:
        """Args: tokenizer: None when the model has none; clock: seconds."""
        self.tokenizer = tokenizer
        self._clock = clock
        self.requests: dict[str, RequestState] = {}

    def add(self, state: RequestState) -> None:
        """Follow a request from now on."""
        self.requests[state.request_id] = state

    def forget(self, request_id: str) -> None:
        """Stop following a request."""
        self.requests.pop(request_id, None)

    def note_started(self, started: Iterable[RequestStarted]) -> None:
        """Note which requests take part in a step for the first time: their wait is over."""
        for event in started:
            if event.request_id in self.requests:
                self.requests[event.request_id].started_s = self._clock()

    def note_failures(self, failures: Mapping[str, str]) -> None:
        """Note why requests failed, by request id; the caller ends them."""
        for request_id, sentence in failures.items():
            if request_id in self.requests:
                self.requests[request_id].error = sentence

    def consume(self, events: Iterable[Event], finish_sample: FinishSample) -> None:
        """Apply a step's events; a stop string ends its sample through ``finish_sample``."""
        now = self._clock()
        for event in events:
            state = self.requests.get(event.request_id)
            if state is None:
                continue
            if isinstance(event, TokenEvent):
                self._token(state, event, now, finish_sample)
            elif isinstance(event, SampleFinished):
                self._sample_finished(state, event)
            else:
                self._request_finished(state, event, now)

    def _sample(self, state: RequestState, index: int) -> SampleState:
        if index not in state.samples:
            text = SampleText(self.tokenizer, state.prompt_token_ids, state.stops)
            state.samples[index] = SampleState(text)
        return state.samples[index]

    def _token(
        self, state: RequestState, event: TokenEvent, now: float, finish_sample: FinishSample
    ) -> None:
        if state.first_token_s is None:
            state.first_token_s = now
        sample = self._sample(state, event.sample_index)
        is_over = sample.finish_reason is not None or sample.text.is_stopped
        if is_over or state.error is not None:
            return
        sample.token_ids.append(event.choice.token_id)
        if event.choice.top is not None:
            sample.logprobs.append(event.choice)
        ends_silently = event.choice.token_id in state.sampling.params.stop_ids
        text = "" if ends_silently else sample.text.push(event.choice.token_id)
        state.deltas.append(StreamDelta(event.sample_index, text, (event.choice.token_id,)))
        if sample.text.is_stopped:
            finish_sample(state.request_id, event.sample_index, "stop")

    def _sample_finished(self, state: RequestState, event: SampleFinished) -> None:
        sample = self._sample(state, event.sample_index)
        is_beam = state.sampling.params.beam_width > 1
        if is_beam:
            sample.score = event.score
            for token_id in event.token_ids:
                sample.token_ids.append(token_id)
                sample.text.push(token_id)
        text = sample.text.finish()
        sample.finish_reason = "error" if state.error else event.reason
        text = sample.text.text if is_beam else text
        tokens = tuple(sample.token_ids) if is_beam else ()
        state.deltas.append(StreamDelta(event.sample_index, text, tokens, sample.finish_reason))

    def _request_finished(self, state: RequestState, event: RequestFinished, now: float) -> None:
        state.output = RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            choices=tuple(
                self._choice(index, state.samples[index]) for index in sorted(state.samples)
            )
            or (Choice(0, "", (), event.reason),),
            cached_tokens=event.num_cached_tokens,
            miss=event.miss,
            timing=self._timing(state, now),
            seed=state.sampling.seed,
            num_preemptions=event.num_preemptions,
            error=state.error,
        )
        state.deltas.append(StreamDelta(0, "", output=state.output))

    def _choice(self, index: int, sample: SampleState) -> Choice:
        logprobs = tuple(self._logprob(choice) for choice in sample.logprobs)
        return Choice(
            index,
            sample.text.text,
            tuple(sample.token_ids),
            sample.finish_reason or "abort",
            logprobs if sample.logprobs else None,
            sample.score,
        )

    def _logprob(self, choice: TokenChoice) -> TokenLogprob:
        top = tuple((token, self._text(token), logprob) for token, logprob in choice.top or ())
        return TokenLogprob(choice.token_id, self._text(choice.token_id), choice.logprob, top)

    def _text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)

    @staticmethod
    def _timing(state: RequestState, now: float) -> Timing:
        started = now if state.started_s is None else state.started_s
        first = now if state.first_token_s is None else state.first_token_s
        later_tokens = (
            max((len(sample.token_ids) for sample in state.samples.values()), default=0) - 1
        )
        return Timing(
            queue_s=started - state.arrived_s,
            ttft_s=first - state.arrived_s,
            tpot_s=(now - first) / later_tokens if later_tokens > 0 else 0.0,
            e2e_s=now - state.arrived_s,
        )
