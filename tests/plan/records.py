"""Start-up records of other engines as planner requests, and what must come out.

A record states some inputs in its fields and the rest in prose ("max_num_batched_tokens 4096"): the
prose is transcribed in `STATED`. Nothing here knows a rule; the rules live in the product.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvern.plan import ExtraCache, Plan, PlanRequest, plan
from kvern.spec.configs import load_model_spec

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
RECORDS = DATA / "engine_logs" / "records.jsonl"
GIB = 2**30
MIB = 2**20

DRAFTER = ExtraCache("sliding", 5, num_kv_heads=8, key_dim=128, value_dim=128, window=2048)

STATED: dict[str, dict[str, Any]] = {
    "lcp-qwen35-9b": {"slots": 4, "unified": True},
    "lcp-qwen36-27b-q8": {"slots": 4, "unified": True},
    "lcp-qwen38-27b-rs3": {"context": 4096, "slots": 1, "speculative_tokens": 2},
    "lcp-unified-2streams": {"slots": 2, "unified": True},
    "lcp-gptoss20b-np8-swa": {"context": 16384, "slots": 8, "ubatch": 256},
    "lcp-gptoss20b-np8-full": {"context": 16384, "slots": 8},
    "lcp-gemma4-e4b-swa": {"context": 32768, "ubatch": 1024},
    "sgl-mimo-v2-flash-swa-tp4": {"num_tokens": 375360},
    "vllm-qwen27b-tp2-mtp2": {"speculative_tokens": 2},
    "vllm-qwen38-27b-dflash7": {"speculative_tokens": 7, "extra_caches": (DRAFTER,)},
    "vllm-qwen38-27b-dflash7-bs816": {
        "speculative_tokens": 7,
        "extra_caches": (DRAFTER,),
        "block_size": 816,
    },
    "vllm-qwen38-27b-hiddenstate": {
        "speculative_tokens": 1,
        "extra_caches": (ExtraCache("hidden", token_bytes=10240),),
    },
    "vllm-qwen35-122b": {"state_mode": "align"},
    "vllm-llama4-scout-tp8-fp8": {"hybrid": True},
    "vllm-llama4-scout-tp8-nohybrid": {"hybrid": False},
    "vllm-glm52-fp8": {"speculative_tokens": 1},
    "vllm-dsv4-flash-tp2": {"max_batched_tokens": 16384},
    "vllm-gemma4-26b-3090-42000": {"max_batched_tokens": 4096},
    "vllm-glm53-flash-643": {"speculative_tokens": 7, "extra_caches": (DRAFTER,)},
}


def load_records() -> list[dict[str, Any]]:
    if not RECORDS.is_file():
        return []
    return [json.loads(line) for line in RECORDS.read_text().splitlines() if line.strip()]


def request_for(record: dict[str, Any], **inputs: Any) -> PlanRequest:
    printed = record["printed"]
    model = load_model_spec(DATA / "model_configs" / record["config_file"])
    context = record["max_model_len"] or printed.get("max_seq_len") or printed.get("ctx")
    fields: dict[str, Any] = {
        "model": model,
        "engine": record["engine"],
        "engine_version": record["version"],
        "kv_format": record["kv_cache_dtype"],
        "tp": record["tensor_parallel"],
        "pp": record["pipeline_parallel"],
        "dp": record["data_parallel"],
        "block_size": record["block_size"],
        "context": context,
    }
    return PlanRequest(**{**fields, **inputs, **STATED.get(record["id"], {})})


def mismatches(record: dict[str, Any]) -> list[str]:
    """What does not match, in words; empty if the record matches."""
    printed = record["printed"]
    if record["engine"] in ("llama.cpp", "ik_llama.cpp"):
        return list(_llama(record))
    if record["engine"] == "sglang":
        return list(_sglang(record))
    if "kv_cache_memory_GiB" in printed:
        return list(_budget(record))
    if "cpu_blocks" in printed:
        return list(_v0(record))
    if "kv_needed_GiB" in printed:
        return list(_needed(record))
    return list(_vllm(record))


def _near(name: str, predicted: float, printed: float, step: float) -> Iterator[str]:
    if abs(predicted - printed) > step / 2 * 1.0000001:
        yield f"{name}: predicted {predicted:,.6f}, printed {printed:,}"


def _between(name: str, low: float, printed: float, high: float) -> Iterator[str]:
    if not low <= printed <= high:
        yield f"{name}: predicted {low:,} to {high:,}, printed {printed:,}"


# ------------------------------------------------------------------------------------- llama.cpp


def _llama(record: dict[str, Any]) -> Iterator[str]:
    printed = record["printed"]
    inputs: dict[str, Any] = {}
    if record["kv_cache_dtype"] == "f32 state":
        inputs["kv_format"] = "f16"
    if "parallel" in printed:
        inputs["slots"] = printed["parallel"]
        inputs["unified"] = printed.get("unified")
    elif "cells" in printed:
        inputs["context"] = printed["cells"] * printed.get("streams", 1)
        inputs["slots"] = printed.get("streams", 1)
    answer = plan(request_for(record, **inputs))
    pools = {pool.name: pool for pool in answer.allocation.pools}
    if "total_MiB" in printed:
        total = sum(pool.bytes for pool in pools.values()) / MIB
        yield from _near("total MiB", total, printed["total_MiB"], 0.01)
        if "cells_total" in printed:
            yield from _near("cells", pools["full"].total_cells, printed["cells_total"], 0)
        return
    if "S_MiB" in printed:
        yield from _state("", pools["state"], printed)
        return
    candidates = [list(_pool(pool, printed)) for name, pool in pools.items() if name != "state"]
    yield from min(candidates, key=len)
    if "recurrent" in record:
        yield from _state("recurrent ", pools["state"], record["recurrent"])


def _pool(pool: Any, printed: dict[str, Any]) -> Iterator[str]:
    yield from _near("cells", pool.cells, printed["cells"], 0)
    yield from _near("streams", pool.streams, printed["streams"], 0)
    yield from _near("layers", pool.layers, printed["layers"], 0)
    yield from _near("MiB", pool.bytes / MIB, printed["size_MiB"], 0.0101)
    for name, size in (("K_MiB", pool.k_bytes), ("V_MiB", pool.v_bytes)):
        if name in printed:
            yield from _near(name, size / MIB, printed[name], 0.01)


def _state(prefix: str, pool: Any, printed: dict[str, Any]) -> Iterator[str]:
    yield from _near(f"{prefix}S MiB", pool.parts["ssm"] / MIB, printed["S_MiB"], 0.0101)
    yield from _near(f"{prefix}R MiB", pool.parts["conv"] / MIB, printed["R_MiB"], 0.0101)
    yield from _near(f"{prefix}MiB", pool.bytes / MIB, printed["size_MiB"], 0.0101)


# ---------------------------------------------------------------------------------------- sglang


def _sglang(record: dict[str, Any]) -> Iterator[str]:
    printed = record["printed"]
    if "rest_memory_GiB" in printed:
        memory = int(printed["rest_memory_GiB"] * GIB)
        answer = plan(request_for(record, kv_memory=memory))
        yield from _near("tokens", answer.allocation.capacity_tokens, printed["max_num_tokens"], 0)
        return
    inputs: dict[str, Any] = {"num_tokens": printed["num_tokens"]}
    if "mamba" in record:
        inputs["slots"] = record["mamba"]["max_mamba_cache_size"]
    answer = plan(request_for(record, **inputs))
    pools = {pool.name: pool for pool in answer.allocation.pools}
    for name, value in printed.items():
        if not name.endswith("_GB"):
            continue
        pool = pools["window" if "swa" in name else "full"]
        size = {"K": pool.k_bytes, "V": pool.v_bytes, "KV": pool.bytes}[name.split("_")[0]]
        yield from _near(name, size / GIB, value, 0.01)
    if "swa" in "".join(printed):
        yield from _near("window tokens", pools["window"].cells, printed["num_tokens"], 0)
    if "mamba" in record:
        parts = pools["state"].parts
        yield from _near("ssm GB", parts["ssm"] / GIB, record["mamba"]["ssm_GB_printed"], 0.01)
        yield from _near("conv GB", parts["conv"] / GIB, record["mamba"]["conv_GB_printed"], 0.01)


# ------------------------------------------------------------------------------------------ vllm


def _interval(gib: float) -> tuple[int, int]:
    """Bytes that a figure printed with two decimals may stand for."""
    return int((gib - 0.005) * GIB), int((gib + 0.005) * GIB)


def _vllm(record: dict[str, Any]) -> Iterator[str]:
    printed = record["printed"]
    if "available_kv_cache_memory_GiB" in printed:
        low, high = _interval(printed["available_kv_cache_memory_GiB"])
        answers = [plan(request_for(record, kv_memory=size)) for size in (low, high)]
    elif "num_gpu_blocks" in printed or "num_blocks" in printed:
        blocks = printed.get("num_gpu_blocks", printed.get("num_blocks"))
        answers = [plan(request_for(record, num_blocks=blocks))] * 2
    else:  # the block count was solved from the printed figures: only their ratio is checked
        low, high = record["check_params"]["num_blocks_interval"]
        answers = [plan(request_for(record, num_blocks=n)) for n in range(low - 1, high + 2)]
        if not any(_prints(answer, printed) for answer in answers):
            yield "no number of blocks in the interval gives the printed figures"
        return
    tokens = [a.allocation.capacity_tokens for a in answers]
    yield from _between("tokens", tokens[0], printed["gpu_kv_cache_size_tokens"], tokens[1])
    if printed.get("max_concurrency_x") is not None:
        values = [a.allocation.max_concurrency for a in answers]
        step = 0.0050001
        yield from _between(
            "concurrency", values[0] - step, printed["max_concurrency_x"], values[1] + step
        )
    if "printed_blocks" in record:
        counts = [a.num_blocks for a in answers]
        yield from _between("blocks", counts[0], record["printed_blocks"], counts[1])
        cpu = answers[0].allocation.extras["cpu_blocks"]
        yield from _near("cpu blocks", cpu, record["printed_cpu_blocks"], 0)
    if "printed_padding_pct" in record:
        state = next(g for g in answers[0].allocation.groups if g.kind == "state")
        used = state.page_bytes - state.page_waste_bytes
        percent = 100 * state.page_waste_bytes / used
        yield from _near("padding %", percent, record["printed_padding_pct"], 0.01)


def _prints(answer: Plan, printed: dict[str, Any]) -> bool:
    a = answer.allocation
    return (
        a.capacity_tokens == printed["gpu_kv_cache_size_tokens"]
        and abs(a.max_concurrency - printed["max_concurrency_x"]) <= 0.0050001
    )


def _v0(record: dict[str, Any]) -> Iterator[str]:
    printed = record["printed"]
    answer = plan(request_for(record, num_blocks=printed["gpu_blocks"]))
    yield from _near("cpu blocks", answer.allocation.extras["cpu_blocks"], printed["cpu_blocks"], 0)
    if "gpu_kv_bytes_implied" in record:
        size = answer.allocation.used_bytes[0]
        yield from _near("bytes", size, record["gpu_kv_bytes_implied"], 0)


def _needed(record: dict[str, Any]) -> Iterator[str]:
    printed = record["printed"]
    low, high = _interval(printed.get("available_GiB", printed["kv_needed_GiB"]))
    answers = [plan(request_for(record, kv_memory=size)) for size in (low, high)]
    needed = answers[0].allocation.bytes_for_context / GIB
    yield from _near("needed GiB", needed, printed["kv_needed_GiB"], 0.01)
    if "estimated_max_len" in printed:
        lengths = [a.allocation.longest_context for a in answers]
        yield from _between("longest", lengths[0], printed["estimated_max_len"], lengths[1])


def _budget(record: dict[str, Any]) -> Iterator[str]:
    printed = record["printed"]

    def rounded(gib: float) -> int:
        return int(gib * GIB)

    share = printed["gpu_memory_utilization"]
    share = float(str(share).split()[0])
    tp = record["tensor_parallel"]
    answer = plan(
        request_for(
            record,
            memory=rounded(printed["device_total_GiB"]),
            utilization=share,
            weights_bytes=rounded(printed["weights_GiB"] * tp),
            reserve=rounded(printed["peak_activation_GiB"] + printed["non_torch_GiB"]),
        )
    )
    predicted = answer.per_rank[0].kv_budget_bytes / GIB
    # four printed figures of two decimals each may be off by half a hundredth
    yield from _near("KV GiB", predicted, printed["kv_cache_memory_GiB"], 0.04)
