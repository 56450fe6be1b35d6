"""What is asked of the planner, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvern.errors import UsageError
from kvern.plan.devices import Device
from kvern.plan.facts import most_full_heads
from kvern.spec.layers import ModelSpec


@dataclass(frozen=True, slots=True)
class ExtraCache:
    """A cache beside the model's own: a drafter's layers, or a cache of hidden states.

    Attributes:
        kind: "full" or "sliding" (a drafter's attention layers) or "hidden" (hidden states).
        num_layers: how many such layers.
        num_kv_heads, key_dim, value_dim: geometry of a drafter's layer.
        window: window of a sliding layer, in tokens.
        token_bytes: bytes per token of a hidden-state layer.
    """

    kind: str
    num_layers: int = 1
    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    token_bytes: int = 0


def parse_extra_cache(text: str) -> ExtraCache:
    """Reads "sliding:layers=5,heads=8,dim=128,window=2048" or "hidden:bytes=10240".

    Raises:
        UsageError: unknown kind or key, or a value that is not a positive number.
    """
    kind, _, rest = text.partition(":")
    names = {"layers": "num_layers", "heads": "num_kv_heads", "dim": "key_dim",
             "value_dim": "value_dim", "window": "window", "bytes": "token_bytes"}  # fmt: skip
    values: dict[str, int] = {}
    for part in filter(None, rest.split(",")):
        key, _, number = part.partition("=")
        if key.strip() not in names or not number.strip().isdigit() or int(number) < 1:
            raise UsageError(
                f"{part!r} in extra cache {text!r} is not one of "
                f"{', '.join(names)} with a positive number, such as layers=5"
            )
        values[names[key.strip()]] = int(number)
    values.setdefault("value_dim", values.get("key_dim", 0))
    cache = ExtraCache(kind.strip(), **values)
    needed = {"full": ("num_kv_heads", "key_dim"), "hidden": ("token_bytes",),
              "sliding": ("num_kv_heads", "key_dim", "window")}  # fmt: skip
    if cache.kind not in needed:
        raise UsageError(f"unknown extra cache {cache.kind!r}: choose full, sliding or hidden")
    for name in needed[cache.kind]:
        if not getattr(cache, name):
            short = next(key for key, field in names.items() if field == name)
            raise UsageError(f"extra cache {text!r} lacks {short}=N")
    return cache


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One question. Sizes in bytes, lengths in tokens; None leaves a default to the engine.

    Attributes:
        model: what the layers need.
        engine: "kvern", "vllm", "sglang" or "llama.cpp" (also "ik_llama.cpp").
        engine_version: as written by the user; None = newest rules.
        device: a catalogue row; its reported memory is the total unless `memory` is given.
        memory: total bytes of one device.
        tp, pp, dp, dcp: parallel degrees; dcp splits a sequence's cache over tensor ranks.
        pp_layers: layers per pipeline stage; None = the engine's own split.
        context: tokens of one request, prompt and output together.
        max_batched_tokens: tokens of a step at most.
        kv_memory: bytes for KV on each rank, instead of a budget.
        num_blocks: blocks of the pool, instead of bytes (an engine's printed block count).
        num_tokens: token slots of the full-attention pool (SGLang), instead of bytes.
        slots: sequences that have their own state or stream.
        speculative_tokens: draft tokens per step; above 0 a model's own MTP layers are counted.
        extra_caches: drafter or hidden-state layers; they replace the model's own MTP layers.
        extra_blocks_per_request: blocks a request holds in groups that cannot be derived here.
        state_mode: recurrent-state caching: "none", "align" or "all"; None = by version.
        state_dtype: dtype of recurrent states; None = the engine's rule.
        window_ratio: SGLang's window pool as a share of the full pool; None = by model.
        hybrid: whether window layers get their own smaller share; None = by version.
        backend: attention backend where it changes the stored form.
        mla: how MLA is stored by llama.cpp: "heads", "latent", "latent+values"; None = by version.
        weights_bytes: weights of the whole model, all ranks together.
    """

    model: ModelSpec
    engine: str = "kvern"
    engine_version: str | None = None
    device: Device | None = None
    memory: int | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    pp_layers: tuple[int, ...] | None = None
    context: int | None = None
    max_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    kv_format: str | None = None
    weights_format: str | None = None
    weights_bytes: int | None = None
    weights_basis: str = "given"
    utilization: float | None = None
    reserve: int | None = None
    kv_memory: int | None = None
    num_blocks: int | None = None
    num_tokens: int | None = None
    slots: int | None = None
    speculative_tokens: int = 0
    extra_caches: tuple[ExtraCache, ...] = ()
    extra_blocks_per_request: int = 0
    ubatch: int | None = None
    unified: bool | None = None
    state_mode: str | None = None
    state_dtype: str | None = None
    window_ratio: float | None = None
    hybrid: bool | None = None
    backend: str | None = None
    mla: str | None = None
    swap_space: int = 4 * 2**30

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_count = field.name in ("speculative_tokens", "extra_blocks_per_request", "reserve")
            if isinstance(value, bool) or not isinstance(value, int):
                continue
            if value < 0 or (value == 0 and not is_count):
                flag = "--" + field.name.replace("_", "-").replace("-bytes", "")
                limit = "must not be negative" if is_count else "must be positive"
                raise UsageError(f"{flag} is {value:,}: it {limit}")
        if self.utilization is not None and not 0 < self.utilization <= 1:
            raise UsageError(
                f"--utilization is {self.utilization}: it is a share of memory, above 0 and at "
                "most 1, such as 0.9"
            )
        if self.window_ratio is not None and not 0 < self.window_ratio <= 1:
            raise UsageError(
                f"--window-ratio is {self.window_ratio}: it is a share of the full pool, above 0 "
                "and at most 1, such as 0.8"
            )
        if self.pp_layers is not None:
            self._check_stages(self.pp_layers)
        elif self.pp > self.model.num_layers:
            raise UsageError(
                f"--pp {self.pp} is more than the {self.model.num_layers} layers of "
                f"{self.model.name}: each stage needs one, so choose at most "
                f"{self.model.num_layers}"
            )
        heads = self.model.num_attention_heads
        if heads is not None and heads % self.tp:
            divisors = [n for n in range(1, heads + 1) if heads % n == 0 and n <= 64]
            raise UsageError(
                f"--tp {self.tp} does not divide the {heads} attention heads of {self.model.name}: "
                f"choose one of {', '.join(map(str, divisors))}"
            )
        if self.tp % self.dcp:
            raise UsageError(
                f"--dcp {self.dcp} does not divide --tp {self.tp}: the ranks that share a "
                "sequence's cache are tensor ranks"
            )
        self._check_shared_heads()

    def _check_shared_heads(self) -> None:
        """Ranks can share a sequence's cache where they would hold the same heads otherwise."""
        heads = most_full_heads(self.model)
        if self.dcp == 1 or heads is None:
            return
        copies = max(self.tp // heads, 1)
        if self.dcp > copies:
            raise UsageError(
                f"--dcp {self.dcp} splits what tensor ranks hold in common, and --tp {self.tp} "
                f"holds each of the {heads} KV heads of {self.model.name} {copies} times: choose "
                f"--dcp {copies}, or --tp {heads * self.dcp}"
            )

    def _check_stages(self, stages: tuple[int, ...]) -> None:
        if len(stages) != self.pp or sum(stages) != self.model.num_layers or min(stages) < 1:
            raise UsageError(
                f"--pp-layers {','.join(map(str, stages))} does not spread the "
                f"{self.model.num_layers} layers of {self.model.name} over --pp {self.pp} stages"
            )

    @property
    def total_memory(self) -> int | None:
        """Bytes of one device, or None when neither device nor memory is given."""
        if self.memory is not None:
            return self.memory
        return None if self.device is None else self.device.memory_bytes

    @property
    def asked_context(self) -> int:
        """The length a request is planned for: asked, else the model's own limit.

        Raises:
            UsageError: neither is known.
        """
        context = self.context or self.model.max_model_len
        if context is None:
            raise UsageError(f"{self.model.name} states no context limit: give --context N")
        return context

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp
