"""The formula with its numbers filled in, as a person would write it, and the KV matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvern.plan.result import Plan, Step
from kvern.plan.roofline import spec_format
from kvern.spec.budget import format_size, kv_matrix
from kvern.spec.codec import Codec
from kvern.spec.content import Heads, Index, Latent, State
from kvern.spec.layers import KVCacheSpec, ModelSpec
from kvern.spec.reach import Chunk, Window

BATCHES = (1, 4, 16, 64)
PLAIN = ("fp32", "fp16", "bf16", "fp8")
LENGTHS = (1024, 4096, 16384, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Matrix:
    """KV bytes of the whole model for context lengths (rows) and batch sizes (columns)."""

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    bytes: tuple[tuple[int, ...], ...]


def matrix_for(model: ModelSpec, context: int, batch: int | None = None) -> Matrix:
    """The KV matrix around the asked length and batch, of the whole model, no block rounding."""
    batches = tuple(sorted({*BATCHES, batch or 1}))
    limit = model.max_model_len or max(LENGTHS)
    lengths = tuple(sorted({n for n in (*LENGTHS, limit) if n <= limit} | {context}))
    return Matrix(lengths, batches, kv_matrix(model, lengths, batches))


def explained(answer: Plan) -> tuple[Step, ...]:
    """All steps: what a token costs in the model, then how the engine turns memory into pool."""
    steps = token_steps(formatted_model(answer), answer.context)
    if answer.engine != "kvern":
        # the engine's own steps follow with its own packing
        first = replace(steps[0], title=f"{steps[0].title} (in {shown_format(answer)})")
        steps = (first, *steps[1:])
    return (*steps, *answer.explanation)


def shown_format(answer: Plan) -> str:
    """The format in which tokens are explained: the asked one, or bf16 where an engine packs."""
    name = spec_format(answer.request)
    return name if answer.engine == "kvern" or name in PLAIN else "bf16"


def formatted_model(answer: Plan) -> ModelSpec:
    """The model with its caches in `shown_format`."""
    return answer.request.model.with_kv_format(shown_format(answer))


def token_steps(model: ModelSpec, context: int) -> tuple[Step, ...]:
    """Cost of a request in two parts: fixed bytes and bytes per token, by kind of layer."""
    kinds: dict[tuple[object, ...], tuple[int, KVCacheSpec]] = {}
    shared = 0
    for layer in model.layers:
        for cache in layer.caches:
            if cache.share_with is not None:
                shared += 1
                continue
            key = (cache.content, cache.reach, cache.stride, cache.k_codec, cache.v_codec)
            kinds[key] = (kinds[key][0] + 1 if key in kinds else 1, cache)
    steps: list[Step] = []
    for count, cache in kinds.values():
        steps.append(_kind_step(count, cache, context))
    if shared:
        steps.append(Step("layers that read another's cache", f"{shared} × 0 B", "0 B"))
    # a window or a state stops growing: what a further token adds is the full layers' part
    fixed, growing = _two_parts(model, context)
    steps.append(
        Step(
            f"one request of {context:,} tokens",
            f"{fixed:,.0f} B fixed + {context:,} × {growing:,.6g} B",
            format_size(model.context_bytes(context)),
        )
    )
    return tuple(steps)


def _two_parts(model: ModelSpec, context: int) -> tuple[float, float]:
    growing = sum(
        cache.bytes_per_token
        for layer in model.layers
        for cache in layer.caches
        if cache.reach.max_visible(context + 1) > cache.reach.max_visible(context)
    )
    return model.context_bytes(context) - growing * context, growing


def _kind_step(count: int, cache: KVCacheSpec, context: int) -> Step:
    content = cache.content
    layers = f"{count} layer{'s' if count > 1 else ''}"
    if isinstance(content, State):
        parts = " + ".join(
            f"{'×'.join(map(str, p.shape))} {p.name} ({p.dtype})" for p in content.parts
        )
        total = count * cache.fixed_bytes
        return Step("recurrent state", f"{layers} × ({parts})", f"{format_size(total)}, fixed")
    bits = _bits(cache)
    if isinstance(content, Heads):
        dims = f"({content.key_dim} + {content.value_dim})"
        formula = f"{layers} × {content.num_kv_heads} KV heads × {dims} × {bits}"
        name = "keys and values"
    elif isinstance(content, Latent):
        formula = f"{layers} × ({content.latent_dim} latent + {content.rope_dim} rotary) × {bits}"
        name = "latent, shared by all heads"
    else:
        assert isinstance(content, Index)
        formula = f"{layers} × {content.dim} × {bits}"
        name = "index keys"
    if cache.stride > 1:
        formula += f" / {cache.stride} tokens"
    result = f"{count * cache.bytes_per_token:,.6g} B per token"
    if isinstance(cache.reach, Window | Chunk):
        seen = cache.reach.max_visible(context)
        what = "window" if isinstance(cache.reach, Window) else "chunk"
        name += f", {what} of {cache.reach.size:,}"
        result += f", at most {seen:,} tokens: {format_size(count * cache.context_bytes(context))}"
    return Step(name, formula, result)


def _bits(cache: KVCacheSpec) -> str:
    """Stored size of an element: "2 B (bf16)", "3 bit (int2 with scales)"."""
    names = [_codec(codec, stream.dim) for stream, codec in cache.streams]
    if len(set(names)) == 1:
        return names[0]
    return f"[{names[0]} keys, {names[1]} values]"


def _codec(codec: Codec, dim: int) -> str:
    if codec.scale is None:
        return f"{codec.bits / 8:g} B ({codec.dtype})"
    tokens = codec.token_group
    bits = codec.stored_bytes(tokens, 1, dim) * 8 / (tokens * dim)
    return f"{bits:.4g} bit ({codec.dtype} with scales)"
