"""Hugging Face transformers: bf16 weights, sdpa attention, requests of equal length as one batch.

A beginning that was computed before is a `DynamicCache` repeated for the batch, as the library's
documentation shows for prefix sharing. Requests that arrive together wait for nobody: one batch.
"""

from __future__ import annotations

import copy
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

PREFILL_CHUNK = 2048


class Adapter:
    """One model."""

    def load(self, options):
        torch.set_num_threads(options["threads"])
        torch.set_grad_enabled(False)
        self.model = AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        return {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "kernel_path": torch.backends.cpu.get_cpu_capability(),
            "kv_format": "bf16",
            "weight_bytes": sum(p.numel() * p.element_size() for p in self.model.parameters()),
        }

    def run(self, work):
        requests = work["requests"]
        lengths = {(len(r["prompt"]), r["max_tokens"]) for r in requests}
        if len(lengths) > 1:
            raise ValueError("requests of one batch must have equal lengths")
        prompts = torch.tensor([r["prompt"] for r in requests])
        max_tokens = requests[0]["max_tokens"]
        cache, cached = DynamicCache(config=self.model.config), 0
        if work["warm"]:
            self._forward(torch.tensor([work["warm"]]), cache)
            cached = len(work["warm"])
            cache = copy.deepcopy(cache)
            cache.batch_repeat_interleave(len(requests))
        started = time.perf_counter()
        tokens = self._forward(prompts[:, cached:], cache)
        first_s = time.perf_counter()
        for _ in range(max_tokens - 1):
            tokens = self._forward(tokens, cache)
        done_s = time.perf_counter()
        used = sum(
            tensor.numel() * tensor.element_size()
            for layer in cache.layers
            for tensor in (layer.keys, layer.values)
        )
        one = {
            "ttft_s": first_s - started,
            "e2e_s": done_s - started,
            "queue_s": 0.0,
            "new_tokens": max_tokens,
            "cached_tokens": cached,
        }
        return {
            "wall_s": done_s - started,
            "requests": [one] * len(requests),
            "kv": {"bytes_used": used, "bytes_total": used},
        }

    def _forward(self, token_ids, cache):
        """The next token of each row, ``[batch, 1]``; long prompts go in chunks, which is faster."""
        for part in token_ids.split(PREFILL_CHUNK, dim=1):
            out = self.model(
                input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        return out.logits[:, -1].argmax(-1, keepdim=True)
