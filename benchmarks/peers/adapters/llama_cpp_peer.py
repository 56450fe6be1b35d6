"""llama.cpp through its C API (package llama-cpp-python), several sequences in one batch.

It does what the project's own server does: at every call it puts the next token of each running
sequence into the batch and fills the rest with prompt tokens, up to n_batch; sequences wait in
order. Prompts that begin alike are shared only where the work says that the beginning was computed
before (`llama_memory_seq_cp` of one sequence to all): that is llama.cpp at its best, its server's slots
do not share. Requests that arrive together on an empty cache each compute their whole prompt.
"""

from __future__ import annotations

import ctypes
import re
import time
from dataclasses import dataclass, field

import llama_cpp
import numpy as np

N_BATCH = 2048
N_UBATCH = 512
KV_TYPES = {
    "f16": "GGML_TYPE_F16",
    "bf16": "GGML_TYPE_BF16",
    "f32": "GGML_TYPE_F32",
    "q8_0": "GGML_TYPE_Q8_0",
}
KV_BYTES = {"f16": 2.0, "bf16": 2.0, "f32": 4.0, "q8_0": 34 / 32}


@dataclass
class Sequence:
    """One request as far as it has come."""

    seq_id: int
    prompt: list[int]
    max_tokens: int
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list)
    scheduled_s: float | None = None
    first_s: float | None = None
    done_s: float | None = None


class Adapter:
    """One model; a context is made for each work, outside the measured time."""

    def load(self, options):
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.options = options
        self.model = llama_cpp.llama_model_load_from_file(options["model"].encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {options['model']}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.context = None
        heads = llama_cpp.llama_model_n_head(self.model)
        head_dim = llama_cpp.llama_model_n_embd(self.model) // heads
        kv_heads = llama_cpp.llama_model_n_head_kv(self.model)
        values = 2 * llama_cpp.llama_model_n_layer(self.model) * kv_heads * head_dim
        self.kv_bytes_per_token = values * KV_BYTES[options["kv_format"]]
        info = llama_cpp.llama_print_system_info().decode()
        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "kernel_path": " ".join(re.findall(r"\b((?:AVX|AMX|NEON|SVE)\w*) = 1", info)),
            "kv_format": options["kv_format"],
            "weight_bytes": llama_cpp.llama_model_size(self.model),
        }

    def run(self, work):
        shares = bool(work["warm"])
        self._make_context(work, unified=shares)
        try:
            sequences = [
                Sequence(i, r["prompt"], r["max_tokens"]) for i, r in enumerate(work["requests"])
            ]
            if shares:
                self._warm(work["warm"], sequences)
            cached = sequences[0].num_computed
            started = time.perf_counter()
            self._generate(sequences)
            wall_s = time.perf_counter() - started
            stored = sum(len(s.prompt) + len(s.tokens) - 1 - cached for s in sequences) + cached
            return {
                "wall_s": wall_s,
                "requests": [
                    {
                        "ttft_s": s.first_s - started,
                        "e2e_s": s.done_s - started,
                        "queue_s": s.scheduled_s - started,
                        "new_tokens": len(s.tokens),
                        "cached_tokens": cached,
                    }
                    for s in sequences
                ],
                "kv": {
                    "bytes_used": int(stored * self.kv_bytes_per_token),
                    "bytes_total": int(self.n_ctx * self.kv_bytes_per_token),
                },
            }
        finally:
            llama_cpp.llama_batch_free(self.batch)
            llama_cpp.llama_free(self.context)

    def close(self):
        llama_cpp.llama_model_free(self.model)

    def _make_context(self, work, unified):
        requests = work["requests"]
        longest = max(len(r["prompt"]) + r["max_tokens"] for r in requests)
        per_sequence = -(-longest // 256) * 256
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = len(requests)
        params.n_ctx = self.n_ctx = per_sequence * len(requests)
        params.n_batch, params.n_ubatch = N_BATCH, N_UBATCH
        params.n_threads = params.n_threads_batch = self.options["threads"]
        params.kv_unified = unified
        params.type_k = params.type_v = getattr(llama_cpp, KV_TYPES[self.options["kv_format"]])
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context of this size")
        self.batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)

    def _warm(self, prefix, sequences):
        """Compute the shared beginning once, in sequence 0, and give it to the others."""
        for start in range(0, len(prefix), N_BATCH):
            self._clear()
            for position, token in enumerate(prefix[start : start + N_BATCH], start):
                self._put(token, position, 0, False)
            self._decode()
        memory = llama_cpp.llama_get_memory(self.context)
        for sequence in sequences:
            if sequence.seq_id:
                llama_cpp.llama_memory_seq_cp(memory, 0, sequence.seq_id, -1, -1)
            sequence.num_computed = len(prefix)

    def _generate(self, sequences):
        while any(s.done_s is None for s in sequences):
            rows = self._fill(sequences)
            self._decode()
            now = None
            for sequence, row in rows:
                token = self._argmax(row)
                now = time.perf_counter()
                sequence.tokens.append(token)
                if sequence.first_s is None:
                    sequence.first_s = now
                if len(sequence.tokens) == sequence.max_tokens:
                    sequence.done_s = now

    def _fill(self, sequences):
        """Tokens of running sequences first, then prompts in order; the rows whose logits are wanted."""
        self._clear()
        rows = []
        live = [s for s in sequences if s.done_s is None]
        for s in live:
            if s.tokens:
                rows.append((s, self._put(s.tokens[-1], s.num_computed, s.seq_id, True)))
                s.num_computed += 1
        for s in live:
            room = N_BATCH - self.batch.n_tokens
            if s.tokens or not room:
                continue
            s.scheduled_s = s.scheduled_s or time.perf_counter()
            stop = min(len(s.prompt), s.num_computed + room)
            for position in range(s.num_computed, stop):
                is_last = position == len(s.prompt) - 1
                row = self._put(s.prompt[position], position, s.seq_id, is_last)
                if is_last:
                    rows.append((s, row))
            s.num_computed = stop
        return rows

    def _clear(self):
        self.batch.n_tokens = 0

    def _put(self, token, position, seq_id, wants_logits):
        row = self.batch.n_tokens
        self.batch.token[row] = token
        self.batch.pos[row] = position
        self.batch.n_seq_id[row] = 1
        self.batch.seq_id[row][0] = seq_id
        self.batch.logits[row] = wants_logits
        self.batch.n_tokens = row + 1
        return row

    def _decode(self):
        code = llama_cpp.llama_decode(self.context, self.batch)
        if code != 0:
            raise RuntimeError(f"llama_decode failed with code {code}")
        llama_cpp.llama_synchronize(self.context)

    def _argmax(self, row):
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        logits = np.ctypeslib.as_array(
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,)
        )
        return int(logits.argmax())
