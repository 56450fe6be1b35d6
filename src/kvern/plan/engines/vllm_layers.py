"""vLLM's view of a layer: what kind of cache it registers, its bytes, its blocks per request."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvern.errors import UsageError
from kvern.plan.engines import vllm_rules as rules_data
from kvern.plan.engines.base import (
    DTYPE_BYTES,
    FORMAT_BYTES,
    GIB,
    canonical_format,
    cdiv,
    num_elements,
    round_up,
    serving_dtype,
)
from kvern.plan.facts import (
    EXTRA_CONV_ELEMENTS,
    is_delta_attention,
    named_state_dtype,
    query_key_dim,
)
from kvern.plan.request import PlanRequest
from kvern.plan.shards import RankCache, has_index, has_latent, rank_caches
from kvern.spec.budget import kv_heads_per_rank
from kvern.spec.content import Heads, Index, Latent, State, StatePart
from kvern.spec.reach import Chunk, Window

GROWING = ("full", "mla", "index")
"""Kinds that need a slot for every token of a request."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a request's blocks depend on besides its length.

    Attributes:
        in_flight: tokens scheduled and not yet settled.
        state_blocks: blocks a recurrent layer keeps per request, whatever its length.
        state_per_block: whether a recurrent layer keeps one more per block of the request.
        dcp: ranks that share a sequence's cache.
    """

    in_flight: int
    state_blocks: int
    state_per_block: bool
    dcp: int


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One registered cache.

    Attributes:
        kind: "full", "sliding", "chunked", "mla", "index", "state" or "hidden".
        token_bytes: stored bytes per token, for a state its bytes.
        shape: geometry that must be equal for layers to share a bucket.
        limit: window or chunk in tokens.
        page_bytes: bytes of a block of this layer, padding included.
        stride: tokens per stored entry.
    """

    layer: int
    kind: str
    token_bytes: int
    shape: tuple[int, ...]
    block_size: int
    page_bytes: int
    limit: int = 0
    stride: int = 1
    origin: str = "model"

    @property
    def key(self) -> tuple[object, ...]:
        """Layers with equal keys share a bucket."""
        return (self.kind, self.shape, self.block_size, self.page_bytes, self.limit, self.stride)

    @property
    def content_bytes(self) -> int:
        """Bytes of the page that hold something."""
        if self.kind == "state":
            return self.token_bytes
        return self.token_bytes * cdiv(self.block_size, self.stride)

    def with_block(self, block_size: int, page_bytes: int) -> PagedLayer:
        """The same layer in blocks of another size."""
        return replace(self, block_size=block_size, page_bytes=page_bytes)

    def as_full(self) -> PagedLayer:
        """The layer charged for every token."""
        return replace(self, kind="full", limit=0)

    def blocks(self, num_tokens: int, setting: Setting) -> int:
        """Blocks that one request of `num_tokens` takes for this layer."""
        if self.kind in GROWING or self.kind == "hidden":
            return cdiv(cdiv(num_tokens, setting.dcp), self.block_size)
        if self.kind == "sliding":
            held = min(self.limit - 1 + setting.in_flight, num_tokens)
            return cdiv(held, self.block_size) + 1
        if self.kind == "chunked":
            return cdiv(min(self.limit + setting.in_flight, num_tokens), self.block_size)
        per_block = cdiv(num_tokens, self.block_size) if setting.state_per_block else 0
        return per_block + setting.state_blocks


def in_flight_tokens(request: PlanRequest, rules: rules_data.Rules) -> tuple[int, str]:
    """Tokens in flight, and where the figure comes from."""
    tokens, why = batched_tokens(request, rules)
    batches = rules.batches_in_flight
    if batches > 1:
        batches = max(batches, request.pp)
        why += f", times {batches} batches in flight"
    return tokens * batches, why


def batched_tokens(request: PlanRequest, rules: rules_data.Rules) -> tuple[int, str]:
    """Tokens of a step at most, and where the figure comes from."""
    if request.max_batched_tokens is not None:
        return request.max_batched_tokens, "a step as given"
    device = request.device
    memory = device.memory_bytes if device is not None and not device.is_cpu else 0
    if device is not None and device.id.startswith(rules_data.SMALL_BATCH_DEVICES):
        memory = 0
    gib, tokens = [row for row in rules.batched_tokens if memory >= row[0] * GIB][-1]
    why = "the default of an API server"
    return tokens, f"{why} on {gib} GiB and more" if gib else why


def setting_of(request: PlanRequest, rules: rules_data.Rules) -> Setting:
    """The setting of a request under a version's rules."""
    mode = request.state_mode or rules.state_mode
    if mode not in ("none", "align", "all"):
        raise UsageError(f"--state-mode {mode!r} does not exist: choose none, align or all")
    state_blocks = {"none": 1, "align": 2, "all": 0}[mode] + request.speculative_tokens
    return Setting(
        in_flight=in_flight_tokens(request, rules)[0],
        state_blocks=state_blocks,
        state_per_block=mode == "all",
        dcp=request.dcp,
    )


def token_bytes(content: Heads | Latent | Index, kv_format: str, beside_latent: bool) -> int:
    """Bytes that vLLM stores per entry and layer.

    Raises:
        UsageError: vLLM has no such KV format.
    """
    if isinstance(content, Index) and beside_latent:
        scales = cdiv(content.dim, rules_data.PACKED_SCALE_GROUP) * rules_data.INDEX_SCALE_BYTES
        return content.dim + scales
    if isinstance(content, Latent) and kv_format == "fp8_ds_mla":
        scales = cdiv(content.latent_dim, rules_data.PACKED_SCALE_GROUP) * 4
        return content.latent_dim + scales + 2 * max(content.rope_dim, rules_data.PACKED_ROPE_DIM)
    packed = rules_data.PACKED_HEADS.get(kv_format)
    if packed is not None and isinstance(content, Heads):
        return content.num_kv_heads * packed.slot_bytes(content.key_dim, content.value_dim)
    element = FORMAT_BYTES.get("fp8" if kv_format == "fp8_ds_mla" else kv_format)
    if element is None:
        known = ", ".join(["auto", "fp16", "bf16", "fp8", "fp8_ds_mla", *rules_data.PACKED_HEADS])
        raise UsageError(f"vLLM stores no KV format {kv_format!r}: choose one of {known}")
    return int(num_elements(content) * element)


def kv_format_of(request: PlanRequest, caches: tuple[RankCache, ...]) -> str:
    """The stored format; fp8 beside sparse attention's index keys is the packed fp8_ds_mla."""
    kv_format = canonical_format(request.kv_format, serving_dtype(request.model))
    is_compressed = any(c.stride > 1 and isinstance(c.content, Latent | Heads) for c in caches)
    if is_compressed or (kv_format == "fp8" and has_latent(caches) and has_index(caches)):
        return "fp8_ds_mla"
    return kv_format


def state_of(content: State, request: PlanRequest) -> State:
    """The state as vLLM stores it: named dtype, and a convolution column per draft token.

    A state whose dtype the configuration does not name is kept in the model's dtype, except that
    KDA always keeps fp32.
    """
    named = request.state_dtype or named_state_dtype(request.model)
    if named is None and is_delta_attention(content):
        named = "fp32"
    model_dtype = serving_dtype(request.model)
    dtype = canonical_format(named, None) if named is not None else model_dtype
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"--state-dtype {dtype!r} does not exist: choose fp32, bf16 or fp16")
    parts: list[StatePart] = []
    for part in content.parts:
        if part.name == "conv":
            *lead, columns = part.shape
            shape = (*lead, columns + request.speculative_tokens)
            parts.append(StatePart(part.name, shape, model_dtype))
        else:
            parts.append(StatePart(part.name, part.shape, dtype))
    return State(tuple(parts))


def default_block_size(caches: tuple[RankCache, ...]) -> int:
    """Tokens per block when the user names none."""
    if any(c.stride > 1 and isinstance(c.content, Latent) for c in caches):
        return rules_data.COMPRESSED_BLOCK
    if has_latent(caches):
        return rules_data.MLA_BLOCK
    is_block_sparse = has_index(caches) and not any(c.is_state for c in caches)
    return rules_data.BLOCK_SPARSE_BLOCK if is_block_sparse else rules_data.GRAIN


def paged_layers(request: PlanRequest, rules: rules_data.Rules) -> tuple[PagedLayer, ...]:
    """Every cache that vLLM registers, in blocks of the size it settles on."""
    caches = _as_registered(request, rules)
    kv_format = kv_format_of(request, caches)
    beside_latent = has_latent(caches)
    states = [state_of(c.content, request) for c in caches if isinstance(c.content, State)]
    block_size = request.block_size or default_block_size(caches)
    page = max((s.fixed_bytes for s in states), default=0)
    if states:
        block_size, page = _align_to_state(block_size, page, caches, kv_format, beside_latent)
    layers: list[PagedLayer] = []
    pending = iter(states)
    for cache in caches:
        if isinstance(cache.content, State):
            state = next(pending)
            shape = tuple(n for part in state.parts for n in part.shape)
            num_bytes = state.fixed_bytes
            layers.append(
                PagedLayer(cache.layer, "state", num_bytes, shape, block_size, max(page, num_bytes))
            )
        elif cache.content is None:
            layers.append(
                PagedLayer(
                    cache.layer,
                    "hidden",
                    cache.token_bytes,
                    (cache.token_bytes,),
                    block_size,
                    cache.token_bytes * block_size,
                    origin=cache.origin,
                )
            )
        else:
            layers.append(_growing(cache, block_size, kv_format, beside_latent))
    elements = EXTRA_CONV_ELEMENTS.get(request.model.family)
    if states and elements is not None:
        num_bytes = elements * DTYPE_BYTES[serving_dtype(request.model)]
        first = next(x.layer for x in layers if x.kind == "state")
        layers.append(
            PagedLayer(first, "state", num_bytes, (elements,), block_size, page, origin="family")
        )
    if states and not beside_latent:
        layers = [_pooled_keys(x) if x.kind == "index" else x for x in layers]
    return tuple(layers)


def _pooled_keys(layer: PagedLayer) -> PagedLayer:
    """Index keys as stored beside recurrent states: pooled, in bf16 whatever the KV format."""
    stride = max(layer.stride, rules_data.POOLED_KEYS)
    stored = layer.shape[1] * rules_data.POOLED_KEY_BYTES
    page = stored * cdiv(layer.block_size, stride)
    return replace(layer, token_bytes=stored, stride=stride, page_bytes=page)


def _as_registered(request: PlanRequest, rules: rules_data.Rules) -> tuple[RankCache, ...]:
    """The rank's caches, with latents expanded to heads where vLLM does so."""
    caches = rank_caches(request)
    model = request.model
    pad = rules_data.EXPANDED_HEAD_DIM
    if model.family in rules_data.EXPANDED_LATENT_FAMILIES:
        pad = 1
    elif rules.latent_stored:
        return caches
    expanded: list[RankCache] = []
    for cache in caches:
        if isinstance(cache.content, Latent):
            dim = query_key_dim(model, cache.content)
            if dim is None or model.num_attention_heads is None:
                raise UsageError(
                    f"this version of vLLM expands the latent of {model.name} to full heads, whose "
                    "sizes its configuration does not state: name a later version"
                )
            heads = kv_heads_per_rank(model.num_attention_heads, request.tp)
            dim = round_up(dim, pad)
            cache = replace(cache, content=Heads(heads, dim, dim))
        expanded.append(cache)
    return tuple(expanded)


def _growing(cache: RankCache, block_size: int, kv_format: str, beside_latent: bool) -> PagedLayer:
    content = cache.content
    assert isinstance(content, Heads | Latent | Index)
    stored = token_bytes(content, kv_format, beside_latent)
    kind, limit = "full", 0
    if isinstance(content, Latent):
        kind = "mla"
    elif isinstance(content, Index):
        kind = "index"
    if isinstance(cache.reach, Window):
        kind, limit = "sliding", cache.reach.size
    elif isinstance(cache.reach, Chunk):
        kind, limit = "chunked", cache.reach.size
    shape = tuple(n for stream in content.streams for n in (stream.num_heads, stream.dim))
    entries = cdiv(block_size, cache.stride)
    return PagedLayer(
        cache.layer,
        kind,
        stored,
        shape,
        block_size,
        stored * entries,
        limit=limit,
        stride=cache.stride,
        origin=cache.origin,
    )


def _align_to_state(
    block_size: int,
    state_page: int,
    caches: tuple[RankCache, ...],
    kv_format: str,
    beside_latent: bool,
) -> tuple[int, int]:
    """Block size at which an attention page holds a state, and that page's bytes.

    The attention block grows in steps of the kernel's grain (or the user's block size) until a
    page is as large as a state; the state's page is then padded to it.
    """
    attention = [
        c for c in caches
        if c.origin == "model" and isinstance(c.content, Heads | Latent) and c.stride == 1
    ]  # fmt: skip
    if not attention:
        return block_size, state_page
    content = attention[0].content
    assert isinstance(content, Heads | Latent)
    per_token = token_bytes(content, kv_format, beside_latent)
    grown = round_up(cdiv(state_page, per_token), block_size)
    block_size = max(block_size, grown)
    return block_size, per_token * block_size
