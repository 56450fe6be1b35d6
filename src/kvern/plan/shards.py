"""What one rank stores of a model: tensor, pipeline and context parallelism applied to caches.

The rules are those of every engine modelled here: KV heads are split over tensor ranks while they
divide and replicated above; a latent (MLA) and an index key exist once per token and are
replicated; a state's leading dimension is split; layers are split over pipeline stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvern.errors import UsageError
from kvern.plan.facts import conv_groups, draft_layers, is_working_input
from kvern.plan.request import PlanRequest
from kvern.spec.budget import kv_heads_per_rank
from kvern.spec.content import Content, Heads, Index, Latent, State, StatePart
from kvern.spec.layers import KVCacheSpec, LayerSpec, ModelSpec
from kvern.spec.reach import All, Last, Reach, Window


@dataclass(frozen=True, slots=True)
class RankCache:
    """One cache of one layer as one rank stores it.

    Attributes:
        layer: index of the layer; layers beyond the model's own come after it.
        origin: "model", "mtp" (the model's own draft layer), "drafter" or "hidden".
        token_bytes: for a hidden-state cache, bytes per token; content is then None.
    """

    layer: int
    content: Content | None
    reach: Reach
    stride: int = 1
    origin: str = "model"
    token_bytes: int = 0

    @property
    def is_state(self) -> bool:
        """Whether the cache is a fixed-size state."""
        return isinstance(self.content, State)


def rank_caches(request: PlanRequest) -> tuple[RankCache, ...]:
    """Every cache of the whole model at the request's tensor-parallel degree.

    Layers that read another layer's cache store nothing and are left out, and so are inputs that a
    compressor still works on: engines keep those by rules of their own.

    Raises:
        UsageError: heads or state do not divide over the ranks.
    """
    model = request.model
    caches = [
        _shard(layer.index, cache, request.tp, model)
        for layer in model.layers
        for cache in layer.caches
        if cache.share_with is None and not is_working_input(layer, cache)
    ]
    next_layer = model.num_layers
    if request.extra_caches:
        caches.extend(_extra_caches(request, next_layer))
    elif request.speculative_tokens:
        for offset, layer in enumerate(draft_layers(model)):
            for cache in layer.caches:
                if is_working_input(layer, cache):
                    continue
                sharded = _shard(next_layer + offset, cache, request.tp, model)
                caches.append(replace(sharded, origin="mtp"))
    return tuple(caches)


def shard_cache(cache: KVCacheSpec, tp: int, model: ModelSpec) -> KVCacheSpec:
    """A cache as one of `tp` tensor ranks stores it.

    Raises:
        UsageError: heads or state do not divide over the ranks.
    """
    content = cache.content
    if isinstance(content, Heads):
        heads = kv_heads_per_rank(content.num_kv_heads, tp)
        return replace(cache, content=replace(content, num_kv_heads=heads))
    if isinstance(content, State):
        parts = tuple(_shard_part(part, content, tp, model) for part in content.parts)
        return replace(cache, content=State(parts))
    return cache


def rank_model(model: ModelSpec, tp: int, layers: tuple[int, ...]) -> ModelSpec:
    """The part of a model that one rank holds, as a model of its own."""
    if tp == 1 and len(layers) == model.num_layers:
        return model
    kept = tuple(
        replace(layer, caches=tuple(shard_cache(cache, tp, model) for cache in layer.caches))
        for layer in (model.layers[index] for index in layers)
    )
    return replace(model, layers=kept, num_layers=len(kept))


def _shard(index: int, cache: KVCacheSpec, tp: int, model: ModelSpec) -> RankCache:
    sharded = shard_cache(cache, tp, model)
    return RankCache(index, sharded.content, sharded.reach, sharded.stride)


def _shard_part(part: StatePart, state: State, tp: int, model: ModelSpec) -> StatePart:
    leading = part.shape[0]
    groups = conv_groups(state) if part.name == "conv" else None
    if groups is not None and groups[0] % tp:
        # a group's projections are needed by all its heads: a group that cannot be split is copied
        # until every rank has one
        leading += 2 * (tp - groups[0]) * groups[1]
    if leading % tp:
        raise UsageError(
            f"--tp {tp} does not divide the {leading} {part.name} channels or heads of a recurrent "
            f"state of {model.name}: choose a divisor"
        )
    return StatePart(part.name, (leading // tp, *part.shape[1:]), part.dtype)


def _extra_caches(request: PlanRequest, first_layer: int) -> list[RankCache]:
    caches: list[RankCache] = []
    for extra in request.extra_caches:
        for _ in range(extra.num_layers):
            layer = first_layer + len(caches)
            if extra.kind == "hidden":
                caches.append(
                    RankCache(layer, None, All(), 1, "hidden", token_bytes=extra.token_bytes)
                )
                continue
            heads = kv_heads_per_rank(extra.num_kv_heads, request.tp)
            reach: Reach = Window(extra.window) if extra.kind == "sliding" else All()
            content = Heads(heads, extra.key_dim, extra.value_dim)
            caches.append(RankCache(layer, content, reach, 1, "drafter"))
    return caches


def stage_layers(request: PlanRequest) -> tuple[tuple[int, ...], ...]:
    """Layer indices of each pipeline stage; layers beyond the model's own go to the last.

    Layers that are left over go to the later stages, but the last one last: it has the head.

    Raises:
        UsageError: a stage would keep no cache.
    """
    model = request.model
    counts = list(request.pp_layers or ())
    if not counts:
        counts = [model.num_layers // request.pp] * request.pp
        for offset in range(model.num_layers % request.pp):
            counts[-(offset + 2) % request.pp] += 1
    stages: list[tuple[int, ...]] = []
    start = 0
    for count in counts:
        stages.append(tuple(range(start, start + count)))
        start += count
    for number, layers in enumerate(stages):
        owned = (c for i in layers for c in model.layers[i].caches if c.share_with is None)
        if next(owned, None) is None:
            raise UsageError(
                f"pipeline stage {number} of {model.name} (layers {layers[0]} to {layers[-1]}) "
                "keeps no cache of its own, its layers read those of another stage: choose a "
                "smaller --pp or other --pp-layers"
            )
    return tuple(stages)


def stage_of(layer: int, stages: tuple[tuple[int, ...], ...]) -> int:
    """The stage that holds `layer`."""
    for stage, layers in enumerate(stages):
        if layers and layer <= layers[-1]:
            return stage
    return len(stages) - 1


def is_recurrent(layer: LayerSpec) -> bool:
    """Whether the layer keeps a state instead of a growing cache."""
    return any(isinstance(cache.reach, Last) for cache in layer.caches)


def has_latent(caches: tuple[RankCache, ...]) -> bool:
    """Whether any cache is an MLA latent."""
    return any(isinstance(cache.content, Latent) for cache in caches)


def has_index(caches: tuple[RankCache, ...]) -> bool:
    """Whether any cache holds sparse attention's index keys."""
    return any(isinstance(cache.content, Index) for cache in caches)
