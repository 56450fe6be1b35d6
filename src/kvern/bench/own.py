"""What the worker of this engine does; an adapter for `kvern.bench.serve` like those of other engines."""

from __future__ import annotations

import time
import warnings
from typing import Any

from kvern import LLM, SamplingParams, __version__
from kvern.bench.breakdown import Accountant
from kvern.bench.kernel import attend_benchmark
from kvern.bench.limits import Limits, measure_limits
from kvern.bench.quality import quality_of
from kvern.bench.recording import Recorder, Step
from kvern.engine.outputs import RequestOutput
from kvern.engine.settings import WEIGHTS_AS
from kvern.engine.tracking import RequestState
from kvern.errors import KvernError
from kvern.spec.budget import format_size

POOL_MARGIN_BYTES = 8 * 2**20
DEFAULT_BLOCK_SIZE = 16
QUICK_READ_BYTES = 16 * 2**20


class Adapter:
    """One engine in its own process, driven through its public interface."""

    def __init__(self) -> None:
        """Holds nothing before `load`."""
        self._llm: LLM | None = None

    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        """Load the model.

        Args:
            options: ``model``, ``threads``, ``kv_format``, ``num_tokens`` (that the pool must hold at
                once), ``max_num_seqs``, and optional fields of ``EngineSettings`` under ``engine``.
        """
        from kvern.spec.configs import load_model_spec

        kv_format = options["kv_format"]
        spec = load_model_spec(options["model"]).with_kv_format(kv_format)
        tokens = options["num_tokens"] + options["max_num_seqs"] * DEFAULT_BLOCK_SIZE
        pool_bytes = int(tokens * spec.kv_bytes_per_token * 1.05) + POOL_MARGIN_BYTES
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._llm = LLM(
                options["model"],
                threads=options["threads"],
                kv_format=kv_format,
                kv_memory=pool_bytes,
                max_num_seqs=options["max_num_seqs"],
                **options.get("engine", {}),
            )
        model = self._llm.model
        rounds = model.backend.name == "native"  # others calculate with decoded weights
        form = model.weights.weights_format if rounds else "fp32"
        return {
            "version": __version__,
            "backend": model.backend.name,
            "kernel_path": model.backend.kernel_path,
            "kv_format": kv_format,
            "weights": f"{format_size(model.weights.nbytes)} in the file, {WEIGHTS_AS[form]}",
            "weight_bytes": model.weights.nbytes,
            "pool_bytes": model.store.nbytes,
        }

    def limits(self, args: dict[str, Any]) -> dict[str, Any]:
        """The machine's limits with this engine's threads and instructions.

        Args:
            args: ``quick``: measure little memory for a short time.
        """
        backend = self._engine.model.backend
        path = backend.kernel_path if backend.name == "native" else None
        brief: dict[str, Any] = (
            {"seconds": 0.01, "read_bytes": QUICK_READ_BYTES} if args["quick"] else {}
        )
        return measure_limits(backend.num_threads, path, **brief).document()

    def quality(self) -> dict[str, Any]:
        """How far the logits are from those over float32 keys and values; see `kvern.bench.quality`."""
        return quality_of(self._engine)

    def run(self, work: dict[str, Any]) -> dict[str, Any]:
        """One run of an item; see `kvern.bench.figures` for what it returns."""
        self._prepare(work)
        started = time.perf_counter()
        states = self._submit(work)
        while self._engine.step():
            pass
        wall_s = time.perf_counter() - started
        return self._record(states, wall_s)

    def profile(self, args: dict[str, Any]) -> dict[str, Any]:
        """Where the time of a step goes: two recorded runs.

        Args:
            args: ``timed`` and ``untouched``: two works of one item, the first for a run whose native
                calls are timed, the second for one whose steps alone are; ``limits`` as `limits` gave them.

        Returns:
            ``phases`` by name, ``kv`` (most bytes that requests held), ``wall_s`` of the untouched run.
        """
        llm = self._engine
        timed, _ = self._recorded(args["timed"], times_calls=True)
        untouched, record = self._recorded(args["untouched"], times_calls=False)
        accountant = Accountant(
            limits=Limits(**args["limits"]),
            kv_format=llm.settings.kv_format,
            stored_weight_bytes=llm.model.weights.nbytes,
        )
        phases = accountant.phases(timed, untouched)
        blocks = max((step.blocks_in_use for step in untouched), default=0)
        return {
            "phases": {name: phase.document() for name, phase in phases.items()},
            "kv": {
                "bytes_used": blocks * llm.model.kv_plan.page_bytes,
                "bytes_total": llm.model.store.nbytes,
            },
            "wall_s": record["wall_s"],
        }

    def _recorded(
        self, work: dict[str, Any], times_calls: bool
    ) -> tuple[list[Step], dict[str, Any]]:
        self._prepare(work)
        with Recorder(self._engine, times_calls) as recorder:
            started = time.perf_counter()
            states = self._submit(work)
            while recorder.step():
                pass
            wall_s = time.perf_counter() - started
        return recorder.steps, self._record(states, wall_s)

    def kernels(self, args: dict[str, Any]) -> list[dict[str, Any]]:
        """Attention alone; see `kvern.bench.kernel`.

        Args:
            args: ``limits`` as `limits` gave them, ``kv_formats``, ``runs``, ``quick``.
        """
        model = self._engine.model
        return attend_benchmark(
            model.backend,
            model.spec,
            args["kv_formats"],
            Limits(**args["limits"]),
            args["runs"],
            args["quick"],
        )

    def close(self) -> None:
        """Give the memory back."""
        if self._llm is not None:
            self._llm.close()
            self._llm = None

    @property
    def _engine(self) -> LLM:
        if self._llm is None:
            raise KvernError("nothing is loaded yet: ask for load first")
        return self._llm

    def _prepare(self, work: dict[str, Any]) -> None:
        """An empty cache, unless the work says otherwise, and then its warm part."""
        if not work["keep_cache"]:
            self._engine.reset_cache()
        if work["warm"]:
            self._engine.generate([work["warm"]], SamplingParams(max_tokens=1, ignore_eos=True))

    def _submit(self, work: dict[str, Any]) -> list[RequestState]:
        return [
            self._engine.submit(
                request["prompt"],
                SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True, seed=0),
            )
            for request in work["requests"]
        ]

    def _record(self, states: list[RequestState], wall_s: float) -> dict[str, Any]:
        outputs = [state.output for state in states if state.output is not None]
        for state in states:
            self._engine.release(state)
        failed = next((output.error for output in outputs if output.error), None)
        if failed or len(outputs) < len(states):
            raise KvernError(failed or "a request did not finish")
        return {
            "wall_s": wall_s,
            "requests": [_request_record(output) for output in outputs],
            "kv": {"bytes_used": None, "bytes_total": self._engine.model.store.nbytes},
        }


def _request_record(output: RequestOutput) -> dict[str, Any]:
    timing = output.timing
    return {
        "ttft_s": timing.ttft_s,
        "e2e_s": timing.e2e_s,
        "queue_s": timing.queue_s,
        "new_tokens": output.num_completion_tokens,
        "cached_tokens": output.cached_tokens,
    }
