"""From a model's name or path to everything that runs it."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvern import catalog
from kvern.core.config import SchedulerConfig
from kvern.core.scheduler import Scheduler
from kvern.engine.backends import make_backend
from kvern.engine.runner import Runner
from kvern.engine.settings import EngineSettings
from kvern.errors import CapacityError, ModelError, UsageError
from kvern.kernels.protocol import Backend
from kvern.models.caches import require_same_caches
from kvern.models.config import DecoderConfig
from kvern.models.decoder import Decoder
from kvern.models.families import family_of
from kvern.models.weights import WeightSource, open_weights
from kvern.spec.budget import format_size
from kvern.spec.configs import load_model_spec, read_config
from kvern.spec.gguf import GGUFHeader, read_header
from kvern.spec.groups import KVPlan, make_kv_plan
from kvern.spec.layers import ModelSpec
from kvern.store.pool import PagedStore
from kvern.text import Tokenizer

FINGERPRINT_SAMPLE_BYTES = 4096
WIDE_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A model without a pool.

    Attributes:
        fingerprint: which weights these are, as text; see `fingerprint`.
        nbytes: bytes of all tensors as stored in the file.
        is_quantised: some are stored in fewer than 16 bits, so that products round activations.
    """

    path: Path
    spec: ModelSpec
    backend: Backend
    weights_format: str
    decoder: Decoder
    tokenizer: Tokenizer | None
    fingerprint: str
    nbytes: int
    is_quantised: bool


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything behind one engine: the weights, and a pool with its bookkeeping."""

    weights: LoadedWeights
    kv_plan: KVPlan
    store: PagedStore
    runner: Runner
    scheduler: Scheduler
    max_model_len: int
    load_s: float

    @property
    def path(self) -> Path:
        """The file or folder."""
        return self.weights.path

    @property
    def spec(self) -> ModelSpec:
        """What its layers leave in the cache."""
        return self.weights.spec

    @property
    def backend(self) -> Backend:
        """What carries out the operations."""
        return self.weights.backend

    @property
    def decoder(self) -> Decoder:
        """The decoder with its weights."""
        return self.weights.decoder

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a folder without one."""
        return self.weights.tokenizer


def load(
    model: str | Path,
    settings: EngineSettings,
    clock: Callable[[], float] = time.monotonic,
    base: LoadedModel | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        model: catalogue name (fetched when absent), GGUF file or Hugging Face folder.
        settings: see there.
        clock: seconds, for the scheduler.
        base: a loaded model whose weights, backend and tokenizer are used again with another pool; its
            backend, threads and weights format then hold, whatever the settings say.

    Raises:
        KvernError: one sentence for whatever is missing, damaged, unknown or too large.
    """
    started = time.perf_counter()
    weights = _load_weights(model, settings) if base is None else _weights_of(base)
    decoder_config = weights.decoder.config
    max_model_len = _context(settings, decoder_config.max_positions)
    kv_plan = make_kv_plan(
        weights.spec,
        settings.kv_format,
        settings.block_size,
        settings.kv_memory_bytes,
        max_num_seqs=settings.max_num_seqs,
    )
    store, runner = _allocate(weights.decoder, kv_plan, settings.max_num_batched_tokens)
    return LoadedModel(
        weights=weights,
        kv_plan=kv_plan,
        store=store,
        runner=runner,
        scheduler=Scheduler(kv_plan, _scheduler_config(settings, weights, max_model_len), clock),
        max_model_len=max_model_len,
        load_s=time.perf_counter() - started,
    )


def _allocate(
    decoder: Decoder, kv_plan: KVPlan, max_num_batched_tokens: int
) -> tuple[PagedStore, Runner]:
    """The pool and the activations; nothing else is allocated for requests later."""
    try:
        store = PagedStore(kv_plan, max_num_batched_tokens)
        return store, Runner(decoder, store, max_num_batched_tokens)
    except (MemoryError, OSError) as error:
        raise CapacityError(
            f"the system cannot give a pool of {format_size(kv_plan.total_bytes)} and activations for "
            f"{max_num_batched_tokens:,} tokens a step: lower kv_memory or max_num_batched_tokens"
        ) from error


def _load_weights(model: str | Path, settings: EngineSettings) -> LoadedWeights:
    path = catalog.resolve(str(model))
    header = None if path.is_dir() else read_header(path)
    config = read_config(header or path)
    family = family_of(config, None if header is None else header.architecture)
    decoder_config = family.describe(config)
    spec = load_model_spec(header or path)
    require_same_caches(decoder_config, spec)
    backend = make_backend(settings.backend, settings.threads)
    source = open_weights(path, header)
    return LoadedWeights(
        path=path,
        spec=spec,
        backend=backend,
        weights_format=settings.weights_format,
        decoder=Decoder(decoder_config, family, source, backend, settings.weights_format),
        tokenizer=_tokenizer(path, header),
        fingerprint=fingerprint(source, decoder_config),
        nbytes=source.nbytes,
        is_quantised=any(t.type not in WIDE_TYPES for t in source.tensors.values()),
    )


def _weights_of(base: LoadedModel) -> LoadedWeights:
    """The same weights with a decoder object of its own."""
    return replace(base.weights, decoder=copy.copy(base.weights.decoder))


def _scheduler_config(
    settings: EngineSettings, weights: LoadedWeights, max_model_len: int
) -> SchedulerConfig:
    regimes = weights.decoder.config.regimes
    return SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_chunk_tokens=settings.max_chunk_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=settings.enable_prefix_caching,
        no_cache=settings.no_cache,
        max_head_of_line_wait_steps=settings.max_head_of_line_wait_steps,
        regime_border=None if regimes is None else regimes.border,
        regime_step=None if regimes is None else regimes.step,
        state_checkpoint_tokens=settings.state_checkpoint_tokens,
        max_state_checkpoint_bytes=settings.max_state_checkpoint_bytes,
        replacement=settings.replacement,
        model=weights.fingerprint,
        numerics=weights.backend.numerics_tag(weights.weights_format),
        kv_format=settings.kv_format,
    )


def _context(settings: EngineSettings, model_limit: int) -> int:
    asked = settings.max_model_len
    if asked is not None and asked > model_limit:
        raise UsageError(
            f"a context of {asked:,} tokens is longer than the model's limit of {model_limit:,}: "
            f"ask for at most {model_limit:,}"
        )
    return asked or model_limit


def _tokenizer(path: Path, header: GGUFHeader | None) -> Tokenizer | None:
    """The model's tokenizer; None for a folder without one (token ids then work, text does not)."""
    if header is not None:
        return Tokenizer.from_gguf(header.metadata)
    return Tokenizer.from_file(path) if (path / "tokenizer.json").exists() else None


def fingerprint(source: WeightSource, config: DecoderConfig) -> str:
    """Which model this is: its decoder's configuration, and of every tensor the name, type, shape and a sample.

    It tells models apart that share a pool's index: equal weights with another rope scaling are another
    model. It reads a few KiB per tensor, not the whole file.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvern-weights")
    digest.update(repr(config).encode() + b"\0")
    for name in sorted(source.tensors):
        tensor = source.tensors[name]
        digest.update(f"{name}\0{tensor.type}\0{tensor.shape}\0{tensor.nbytes}\0".encode())
        data = source.raw(name)
        digest.update(data[:FINGERPRINT_SAMPLE_BYTES].tobytes())
        digest.update(data[-FINGERPRINT_SAMPLE_BYTES:].tobytes())
    return digest.hexdigest()


def require_tokenizer(model: LoadedModel) -> Tokenizer:
    """The tokenizer, or a sentence that says what to do without one."""
    if model.tokenizer is None:
        raise ModelError(
            f"{model.path} has no tokenizer.json: add it, or pass prompts as token ids"
        )
    return model.tokenizer
