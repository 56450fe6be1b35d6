"""What one request cost and what the cache did for it: in JSON and in plain words."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvern import LLM
    from kvern.core.miss import MissReason
    from kvern.engine.outputs import RequestOutput

_REASONS = {
    "stop": "the model was done",
    "length": "the limit of new tokens was reached",
    "abort": "it was interrupted",
}


def usage_document(output: RequestOutput) -> dict[str, Any]:
    """Token counts in OpenAI's form."""
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": output.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
    }


def completion_document(llm: LLM, output: RequestOutput, load_s: float) -> dict[str, Any]:
    """The object that `run --json` prints."""
    timing = output.timing
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": output.finish_reason,
        "usage": usage_document(output),
        "timing": {
            "load_s": load_s,
            "ttft_s": timing.ttft_s,
            "tpot_s": timing.tpot_s,
            "e2e_s": timing.e2e_s,
        },
        "kv": kv_document(llm),
        "work": work_document(llm),
        "seed": output.seed,
        "miss": _miss_document(llm, output),
    }


def kv_document(llm: LLM) -> dict[str, Any]:
    """Format, sizes and occupation of the block pool."""
    return dict(llm.kv_info)


def work_document(llm: LLM) -> dict[str, int]:
    """What was really computed, from the executor's counters."""
    work = llm.work
    return {
        "tokens_processed": work.tokens_processed,
        "query_key_products": work.query_key_products,
    }


def stats_lines(llm: LLM, output: RequestOutput, load_s: float) -> list[str]:
    """What `--stats` prints, one thought a line."""
    num_prompt, num_new = len(output.prompt_token_ids), output.num_completion_tokens
    reason = _REASONS.get(output.finish_reason, output.finish_reason)
    return [
        "",
        f"prompt    {num_prompt:,} tokens, {output.cached_tokens:,} of them from the cache",
        *(f"          not cached: {reason}" for reason in miss_reasons(llm, output)),
        f"answer    {num_new:,} tokens; ended because {reason}",
        _time_line(output, load_s),
        "KV cache  not used: every step recomputed everything"
        if llm.settings.no_cache
        else _cache_line(kv_document(llm)),
        _work_line(work_document(llm)),
    ]


def miss_reasons(llm: LLM, output: RequestOutput) -> list[str]:
    """Why the rest of the prompt was not found in the cache; differing tokens are shown as text."""
    if output.miss is None:
        return []
    return [_reason_text(llm, reason) for reason in output.miss.reasons]


def _miss_document(llm: LLM, output: RequestOutput) -> dict[str, Any] | None:
    if output.miss is None:
        return None
    document = dataclasses.asdict(output.miss)
    for reason, words in zip(document["reasons"], miss_reasons(llm, output), strict=True):
        reason["explanation"] = words
    return document


def _reason_text(llm: LLM, reason: MissReason) -> str:
    if reason.kind != "text_differs" or reason.stored_token is None or reason.prompt_token is None:
        return str(reason)
    prompted, stored = map(llm.tokenizer.token_text, (reason.prompt_token, reason.stored_token))
    return (
        f"token {reason.position} differs: {_quoted(prompted)} in the prompt, "
        f"{_quoted(stored)} in what is stored"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def turn_lines(llm: LLM, output: RequestOutput) -> list[str]:
    """What `chat --stats` prints after an answer."""
    timing = output.timing
    summary = (
        f"[{len(output.prompt_token_ids):,} prompt tokens, {output.cached_tokens:,} of them from "
        f"the cache; {output.num_completion_tokens:,} new; first after {timing.ttft_s:.2f} s"
        f"{_rate(timing.tpot_s)}]"
    )
    return [summary, *(f"[not cached: {reason}]" for reason in miss_reasons(llm, output))]


def _time_line(output: RequestOutput, load_s: float) -> str:
    timing = output.timing
    return (
        f"time      {load_s:.2f} s to load, {timing.ttft_s:.2f} s to the first token"
        f"{_rate(timing.tpot_s)}, {timing.e2e_s:.2f} s for the whole answer"
    )


def _rate(tpot_s: float) -> str:
    if tpot_s <= 0:
        return ""
    return f", then {tpot_s * 1e3:.1f} ms per token ({1 / tpot_s:.0f} tokens/s)"


def _cache_line(kv: dict[str, Any]) -> str:
    mib = 1 << 20
    open_bytes = kv.get("open_bytes", 0) + kv.get("row_bytes", 0)
    beside = f" and {open_bytes / mib:,.1f} MiB of open blocks in bf16" if open_bytes else ""
    return (
        f"KV cache  {kv['format']}, {kv['bytes_per_token']:,} bytes per token in blocks of "
        f"{kv['block_size']} tokens: {kv['blocks_used']:,} of {kv['blocks_total']:,} blocks used "
        f"({kv['bytes_used'] / mib:,.1f} of {kv['bytes_total'] / mib:,.1f} MiB){beside}"
    )


def _work_line(work: dict[str, int]) -> str:
    return (
        f"work      {work['tokens_processed']:,} tokens processed, "
        f"{work['query_key_products']:,} query-key products per head over all layers"
    )
