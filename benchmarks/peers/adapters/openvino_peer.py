"""OpenVINO GenAI: its continuous batching pipeline, prefix caching on, the GGUF file as it is."""

from __future__ import annotations

import time

import numpy as np
import openvino
import openvino_genai

BLOCK_SIZE = 32


class Adapter:
    """One pipeline."""

    def load(self, options):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = options["max_num_seqs"]
        scheduler.max_num_batched_tokens = options.get("max_num_batched_tokens", 512)
        scheduler.num_kv_blocks = (
            -(-options["num_tokens"] // BLOCK_SIZE) + options["max_num_seqs"] + 8
        )
        properties = {
            "INFERENCE_NUM_THREADS": options["threads"],
            "KV_CACHE_PRECISION": options["kv_format"],
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            options["model"], scheduler, "CPU", properties
        )
        self.next_id = 0
        return {
            "version": f"openvino-genai {openvino_genai.__version__}",
            "kernel_path": openvino.Core().get_property("CPU", "FULL_DEVICE_NAME"),
            "kv_format": options["kv_format"],
        }

    def run(self, work):
        if work["warm"]:
            self._generate([{"prompt": work["warm"], "max_tokens": 1}])
        return self._generate(work["requests"])

    def _generate(self, requests):
        started = time.perf_counter()
        handles = [self._add(r) for r in requests]
        counts = [0] * len(handles)
        firsts = [None] * len(handles)
        ends = [None] * len(handles)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now = time.perf_counter()
            for index, handle in enumerate(handles):
                if ends[index] is not None:
                    continue
                counts[index] += _new_tokens(handle)
                if counts[index] and firsts[index] is None:
                    firsts[index] = now
                if counts[index] >= requests[index]["max_tokens"]:
                    ends[index] = now
        return {
            "wall_s": time.perf_counter() - started,
            "requests": [
                {
                    "ttft_s": firsts[i] - started,
                    "e2e_s": ends[i] - started,
                    "queue_s": None,
                    "new_tokens": counts[i],
                    "cached_tokens": None,
                }
                for i in range(len(handles))
            ],
            "kv": None,
        }

    def _add(self, request):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.min_new_tokens = request["max_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([request["prompt"]], np.int64))
        self.next_id += 1
        return self.pipeline.add_request(self.next_id, ids, config)


def _new_tokens(handle):
    """Tokens that the last step brought; each is reported once."""
    if not handle.can_read():
        return 0
    return sum(len(output.generated_ids) for output in handle.read().values())
