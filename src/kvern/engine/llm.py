"""The public engine: many requests through one pool, one step at a time."""

from __future__ import annotations

import functools
import itertools
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.core.events import Subscriber
from kvern.core.integrity import IntegrityReport
from kvern.core.sequence import Request
from kvern.core.stats import CacheStats
from kvern.engine.loading import LoadedModel, load, require_tokenizer
from kvern.engine.metrics import prometheus_text
from kvern.engine.outputs import Pin, RequestOutput
from kvern.engine.params import SamplingParams
from kvern.engine.runner import WorkCounters
from kvern.engine.sampler import Sampling
from kvern.engine.settings import EngineSettings
from kvern.engine.step_loop import StepLoop
from kvern.engine.streaming import DeltaStream
from kvern.engine.tracking import RequestState, Tracker
from kvern.errors import InputError, IntegrityError, KvernError

Prompt = str | Sequence[int]
"""A prompt as text or as token ids."""


class LLM:
    """A model with its cache.

    Safe to use from several threads: whoever waits for its own answer takes the next step for everybody.

    Example:
        >>> with LLM("smollm2") as llm:
        ...     print(llm.generate("The capital of France is")[0].text)
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        clock: Callable[[], float] = time.monotonic,
        settings: EngineSettings | None = None,
        share_weights_with: LLM | None = None,
        **options: Any,
    ) -> None:
        """Load a model and allocate its pool.

        Args:
            model: catalogue name, GGUF file or Hugging Face folder.
            clock: seconds, injected for tests.
            settings: all settings at once, instead of ``options``.
            share_weights_with: an engine on the same model whose weights, backend and tokenizer are used
                again; this one gets its own pool.
            **options: fields of `EngineSettings`: ``kv_format``, ``kv_memory``, ``block_size``,
                ``enable_prefix_caching``, ``max_num_seqs``, ``max_num_batched_tokens``,
                ``max_model_len``, ``backend``, ``threads``, ``weights_format``, ``replacement``, ...

        Raises:
            KvernError: one sentence for whatever is missing, damaged, unknown or too large.
            TypeError: an option that does not exist.
        """
        self.settings = settings or EngineSettings(**options)
        base = share_weights_with.model if share_weights_with else None
        self._loaded: LoadedModel | None = load(model, self.settings, clock, base)
        tracker = Tracker(self._loaded.tokenizer, clock)
        self._open_loop: StepLoop | None = StepLoop(
            self._loaded.scheduler, self._loaded.runner, tracker, clock
        )
        self._ids = itertools.count()

    # -- asking ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, all in one batch.

        Args:
            prompts: text or token ids, or a list of either.
            params: for all, or one per prompt; default greedy.
            on_progress: called with (finished, total) after each finished request.

        Returns:
            One output per prompt, in order.

        Raises:
            InputError: a prompt or parameter that cannot be served; nothing has run then.
        """
        listed = _as_prompts(prompts)
        states = self._submit(listed, _as_params(params, len(listed)))
        try:
            for done, state in enumerate(states, 1):
                while state.output is None:
                    self._loop.advance(functools.partial(_is_finished, state))
                if on_progress is not None:
                    on_progress(done, len(states))
        finally:
            self._loop.release(states)
        return [state.output for state in states if state.output is not None]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> DeltaStream:
        """Answer one prompt piece by piece; the last piece carries the whole `RequestOutput`.

        Leaving the loop early aborts the request. Raises InputError as `generate`.
        """
        (state,) = self._submit([prompt], _as_params(params, 1))
        return DeltaStream(self._loop, state)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[npt.NDArray[np.float64]]:
        """Log-probabilities of given tokens.

        Args:
            prompts: text or token ids, or a list of either, each at least two tokens.
            on_progress: called after each step with (scored, all) tokens. A model whose positions turn by
                the length (dynamic NTK) takes one pass per token beyond its original context.

        Returns:
            Per prompt float64 ``[len(ids) - 1]``: the natural log-probability of each token after the first,
            given those before it. Every position is computed, so no cached prefix is used.
        """
        requests: list[tuple[Request, str | None]] = []
        for prompt in _as_prompts(prompts):
            ids = self.token_ids(prompt)
            if len(ids) < 2:
                raise InputError(f"scoring needs at least 2 tokens, got {len(ids)}")
            requests.append((self._request(ids, SamplingParams(), needs_all_logits=True), None))
        runner, total = self._model.runner, sum(len(each.prompt) - 1 for each, _ in requests)
        states = self._loop.submit(requests)
        try:
            for state in states:
                while state.output is None:
                    self._loop.advance(functools.partial(_is_finished, state))
                    if on_progress is not None:
                        on_progress(sum(runner.num_scored(s.request_id) for s in states), total)
                if state.error is not None:
                    raise IntegrityError(state.error)
            return [runner.take_scores(state.request_id) for state in states]
        finally:
            self._loop.release(states)
            for state in states:
                runner.take_scores(state.request_id)

    # -- submitting and stepping: what the async engine builds on ------------------------------------

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestState:
        """Add a request without waiting for it; see `step`. Raises InputError as `generate`."""
        if request_id is not None and not isinstance(request_id, str):
            raise InputError(f"request_id is {request_id!r}: it must be a string")
        (state,) = self._submit([prompt], _as_params(params, 1), request_id)
        return state

    def release(self, state: RequestState) -> None:
        """Forget a submitted request; aborts it when it still runs."""
        self._loop.release([state])

    def abort(self, request_id: str) -> None:
        """End a request now; its blocks are given back, what is finished stays in the cache."""
        self._loop.abort(request_id)

    def step(self) -> bool:
        """Plan, execute and commit one step for all requests; False when there was nothing to do."""
        return self._loop.step()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self._loop.has_work

    def _submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_id: str | None = None,
    ) -> list[RequestState]:
        requests = [
            (
                self._request(self.token_ids(prompt), each, request_id),
                prompt if isinstance(prompt, str) else None,
            )
            for prompt, each in zip(prompts, params, strict=True)
        ]
        return self._loop.submit(requests)

    def _request(
        self,
        ids: npt.NDArray[np.int32],
        params: SamplingParams,
        request_id: str | None = None,
        needs_all_logits: bool = False,
    ) -> Request:
        tokenizer = self._model.tokenizer
        if params.stop:
            require_tokenizer(self._model)  # stop strings are text
        ends = frozenset() if tokenizer is None or params.ignore_eos else tokenizer.eos_ids
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return Request(
            request_id=request_id or f"request-{next(self._ids)}",
            prompt=ids,
            max_tokens=0 if needs_all_logits else params.max_tokens,
            stop_token_ids=ends | params.stop_ids,
            n=params.n,
            beam_width=params.beam_width if params.beam_width > 1 else 0,
            beam_length_penalty=params.length_penalty,
            priority=params.priority,
            cache_salt=params.cache_salt,
            needs_all_logits=needs_all_logits,
            sampling=Sampling(params, seed),
        )

    # -- text ----------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's `kvern.text.Tokenizer`. Raises ModelError when it has none."""
        return require_tokenizer(self._model)

    def token_ids(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """A prompt as token ids, int32.

        Raises:
            InputError: it is empty, or a token id is not in the vocabulary.
        """
        if isinstance(prompt, str):
            ids: Sequence[int] = require_tokenizer(self._model).encode(prompt)
        elif isinstance(prompt, list | tuple | np.ndarray | range):
            ids = prompt
        else:
            raise InputError(f"{prompt!r} is neither text nor a list of token ids")
        if len(ids) == 0:
            raise InputError("the prompt is empty: give at least one token")
        vocab_size = self._model.decoder.config.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise InputError(f"token id {token!r} is not a whole number")
            if not 0 <= token < vocab_size:
                raise InputError(
                    f"token id {token} is outside the model's vocabulary of {vocab_size:,} tokens"
                )
        return np.array(ids, np.int32)

    # -- explaining ----------------------------------------------------------------------------------

    @property
    def model(self) -> LoadedModel:
        """What is loaded: paths, specs, pool, backend. Raises KvernError after `close`."""
        return self._model

    @property
    def _model(self) -> LoadedModel:
        if self._loaded is None:
            raise KvernError("this LLM is closed: make a new one")
        return self._loaded

    @property
    def _loop(self) -> StepLoop:
        if self._open_loop is None:
            raise KvernError("this LLM is closed: make a new one")
        return self._open_loop

    @property
    def work(self) -> WorkCounters:
        """Tokens and products computed so far, counted where they are computed."""
        return self._model.runner.counters

    @property
    def kv_info(self) -> dict[str, Any]:
        """The pool in figures: format, block_size, bytes_per_token, blocks and bytes, total and used.

        Used counts what requests hold and what is kept for later ones. Narrow formats take open blocks
        and rows beside the pool: open_bytes and row_bytes, 0 for others.
        """
        plan, stats = self._model.kv_plan, self.stats()
        used = stats.in_use_blocks + stats.cached_blocks
        spec = self._model.spec.with_kv_format(self.settings.kv_format)
        return {
            "format": self.settings.kv_format,
            "block_size": self.settings.block_size,
            "bytes_per_token": spec.kv_bytes_per_token,
            "blocks_total": plan.num_blocks,
            "blocks_used": used,
            "bytes_total": self._model.store.nbytes,
            "bytes_used": used * plan.page_bytes,
            "open_bytes": self._model.store.open_bytes,
            "row_bytes": self._model.store.row_bytes,
        }

    def stats(self) -> CacheStats:
        """A snapshot of the cache: blocks free, cached and in use, bytes, and running totals."""
        with self._loop.lock:
            return self._model.scheduler.stats()

    def metrics(self) -> str:
        """Counters and gauges in Prometheus' text format; see `kvern.engine.metrics`."""
        return prometheus_text(self.stats(), self.work)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Follow what happens to cached content: stored, removed, cleared.

        Args:
            subscriber: called within a step with each `kvern.core.events.CacheEvent`; must be quick.

        Returns:
            Ends the subscription when called.
        """
        with self._loop.lock:
            return self._model.scheduler.subscribe(subscriber)

    def pin(self, prompt: Prompt, ttl_s: float, params: SamplingParams | None = None) -> Pin:
        """Keep the stored prefix of a prompt from replacement for a while.

        Args:
            prompt: whose beginning to hold; only what is stored now is held.
            ttl_s: for how many seconds. A pin yields earlier when a request could not run otherwise.
            params: only the cache_salt matters.
        """
        is_number = isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool)
        if not is_number or not 0 < ttl_s < math.inf:
            raise InputError(f"ttl_s is {ttl_s!r}: give a finite number of seconds above 0")
        request = self._request(self.token_ids(prompt), _as_params(params, 1)[0])
        with self._loop.lock:
            pin_id, num_tokens = self._model.scheduler.pin(request, ttl_s)
        return Pin(pin_id, num_tokens)

    def unpin(self, pin: Pin) -> bool:
        """Release a pin; False when it had already ended."""
        with self._loop.lock:
            return self._model.scheduler.unpin(pin.pin_id)

    def check_integrity(self, repair: bool = False) -> IntegrityReport:
        """Verify pool, tables and index against each other; see `Scheduler.check_integrity`."""
        with self._loop.lock:
            return self._model.scheduler.check_integrity(repair=repair)

    def reset_cache(self) -> None:
        """Forget every cached block that no request holds."""
        with self._loop.lock:
            self._model.scheduler.clear()

    def close(self) -> None:
        """Abort what runs and give the memory back. Further use raises KvernError."""
        loop = self._open_loop
        if loop is None:
            return
        with loop.lock:
            loop.release(list(loop.tracker.requests.values()))
            self._loaded = self._open_loop = None

    def __enter__(self) -> LLM:
        """Use as a context manager; closes at the end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _is_finished(state: RequestState) -> bool:
    return state.output is not None


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of prompts, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
        raise InputError(f"{prompts!r} is neither text, nor token ids, nor a list of either")
    listed = list(prompts)
    if not listed or isinstance(listed[0], int | np.integer):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed: list[Any] = list(params) if isinstance(params, list | tuple) else [params]
    for each in listed:
        if not isinstance(each, SamplingParams):
            raise InputError(f"{each!r} is not a SamplingParams: make one from your values")
    if len(listed) != count:
        raise InputError(
            f"{len(listed)} sampling parameters for {count} prompts: give one, or one each"
        )
    return listed
