"""vLLM on the CPU: bf16 weights, prefix caching on, its engine stepped request by request."""

from __future__ import annotations

import os
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import vllm
from vllm import LLM, SamplingParams

GIB = 2**30


class Adapter:
    """One engine."""

    def load(self, options):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores(options["threads"]))
        self.llm = LLM(
            model=options["model"],
            dtype="bfloat16",
            max_num_seqs=options["max_num_seqs"],
            max_model_len=options["max_request_tokens"] + 16,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self.engine = self.llm.llm_engine
        self.next_id = 0
        return {
            "version": f"vllm {vllm.__version__}",
            "kv_format": "bf16",
        }

    def run(self, work):
        if work["warm"]:
            self._generate([{"prompt": work["warm"], "max_tokens": 1}])
        return self._generate(work["requests"])

    def _generate(self, requests):
        started = time.perf_counter()
        ids = [self._add(r) for r in requests]
        firsts, ends, counts, cached = {}, {}, {}, {}
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                name = output.request_id
                counts[name] = counts.get(name, 0) + len(output.outputs[0].token_ids)
                firsts.setdefault(name, now)
                cached[name] = output.num_cached_tokens
                if output.finished:
                    ends[name] = now
        return {
            "wall_s": time.perf_counter() - started,
            "requests": [
                {
                    "ttft_s": firsts[i] - started,
                    "e2e_s": ends[i] - started,
                    "queue_s": None,
                    "new_tokens": counts[i],
                    "cached_tokens": cached[i],
                }
                for i in ids
            ],
            "kv": None,
        }

    def _add(self, request):
        from vllm.sampling_params import RequestOutputKind

        self.next_id += 1
        name = f"r{self.next_id}"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
        return name


def _cores(threads):
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return ",".join(map(str, cores))
