"""Small synthetic models for the tests of the specification."""

from __future__ import annotations

from kvern.spec import (
    All,
    Heads,
    KVCacheSpec,
    Last,
    LayerSpec,
    ModelSpec,
    Reach,
    State,
    StatePart,
    Window,
)

DELTA_STATE = State(
    (StatePart("conv", (8192, 3), "bf16"), StatePart("recurrent", (32, 128, 128), "fp32"))
)


def heads(num_kv_heads: int, dim: int, reach: Reach | None = None) -> KVCacheSpec:
    return KVCacheSpec(Heads(num_kv_heads, dim, dim), reach or All())


def state() -> KVCacheSpec:
    return KVCacheSpec(DELTA_STATE, Last())


def model_of(*caches: KVCacheSpec | tuple[KVCacheSpec, ...], name: str = "sample") -> ModelSpec:
    layers = tuple(
        LayerSpec(i, "attention", cache if isinstance(cache, tuple) else (cache,))
        for i, cache in enumerate(caches)
    )
    return ModelSpec(name, "Sample", "sample", len(layers), layers)


def smollm2() -> ModelSpec:
    return model_of(*[heads(3, 64)] * 30)


def gemma3_270m() -> ModelSpec:
    full, window = heads(1, 256), heads(1, 256, Window(512))
    return model_of(*([window] * 5 + [full]) * 3)


def gemma3_27b() -> ModelSpec:
    full, window = heads(16, 128), heads(16, 128, Window(1024))
    return model_of(*([window] * 5 + [full]) * 10, window, window)


def qwen3_next() -> ModelSpec:
    return model_of(*([state()] * 3 + [heads(2, 256)]) * 12)
