"""Draws the pictures of docs/how-the-cache-works.md by running the product.

pip install ".[docs]"
python docs/figures.py            writes docs/images/*.png and prints the figures in the text
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from kvern import LLM, SamplingParams
from kvern.engine.runner import Observer

IMAGES = Path(__file__).parent / "images"
INK, CACHED, COMPUTED, OPEN = "#1f2933", "#2f855a", "#dd6b20", "#f6e05e"
SYSTEM = "You answer in one short sentence. You never apologise, and you never repeat the question."


class Watch(Observer):
    """Notes, per step, what each sequence computed and which blocks its table named."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[str, int, int, list[int]]]] = []

    def on_chunks(self, chunks: Sequence[Any]) -> None:
        """Called before each step."""
        self.steps.append(
            [
                (c.seq.request.request_id, c.start, c.length, c.seq.tables[0].blocks.tolist())
                for c in chunks
            ]
        )


def work_with_and_without() -> None:
    """Tokens per step and time per token of one answer, with the cache and without."""
    new_tokens = 96
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for no_cache, colour, name in ((False, CACHED, "with the cache"), (True, COMPUTED, "without")):
        with LLM("smollm2", no_cache=no_cache) as llm:
            prompt = llm.tokenizer.encode("The history of the printing press begins " * 9)[:64]
            params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
            llm.generate([prompt], SamplingParams(max_tokens=2, cache_salt="warm-up"))
            before, tokens, seconds = llm.work.tokens_processed, [], []
            last = None
            for delta in llm.stream(prompt, params):
                if not delta.token_ids:
                    continue
                now = llm.work.tokens_processed
                tokens.append(now - before)
                before = now
                stamp = _clock()
                if last is not None:
                    seconds.append(stamp - last)
                last = stamp
        print(f"{name}: {sum(tokens):,} tokens processed, {np.median(seconds) * 1e3:.1f} ms/token")
        left.plot(range(1, len(tokens) + 1), tokens, color=colour, lw=2, label=name)
        right.plot(
            range(2, len(seconds) + 2), np.array(seconds) * 1e3, color=colour, lw=1.5, label=name
        )
    left.set(title="Tokens a step processes", xlabel="new token", ylabel="tokens", ylim=0)
    right.set(title="Time per new token", xlabel="new token", ylabel="milliseconds", ylim=0)
    left.legend(frameon=False)
    _save(figure, "work.png")


def _clock() -> float:
    import time

    return time.perf_counter()


def conversation() -> None:
    """Prompt tokens of each turn: found in the cache, or computed."""
    questions = [
        "What does a hand mill do?",
        "What is it called in Norwegian?",
        "Which grains are ground with it?",
        "Why did people stop using it?",
        "What replaced it?",
        "Where can I still see one?",
    ]
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    cached, computed = [], []
    with LLM("smollm2") as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            ids = llm.tokenizer.apply_chat_template(messages)
            (out,) = llm.generate([ids], SamplingParams(max_tokens=40))
            messages.append({"role": "assistant", "content": out.text})
            cached.append(out.cached_tokens)
            computed.append(len(ids) - out.cached_tokens)
            print(f"turn {len(cached)}: {out.miss}")
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    turns = np.arange(1, len(cached) + 1)
    axes.bar(turns, cached, color=CACHED, label="found in the cache")
    axes.bar(turns, computed, bottom=cached, color=COMPUTED, label="computed")
    for turn, found, new in zip(turns, cached, computed, strict=True):
        axes.text(turn, found + new + 4, f"{new} computed", ha="center", fontsize=9, color=INK)
    axes.set(title="Prompt tokens of each turn of a conversation", xlabel="turn", ylabel="tokens")
    axes.set_ylim(0, max(np.add(cached, computed)) * 1.15)
    axes.legend(frameon=False, loc="upper left")
    _save(figure, "conversation.png")


def block_tables() -> None:
    """Which physical block holds which positions of three requests with one beginning."""
    with LLM("smollm2", block_size=8) as llm:
        head = [{"role": "system", "content": SYSTEM}]
        prompts = [
            llm.tokenizer.apply_chat_template([*head, {"role": "user", "content": text}])
            for text in ("Name a metal.", "Name a river in Europe.", "Name a planet with rings.")
        ]
        watch = Watch()
        llm.model.runner.observer = watch
        llm.generate(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
        step = max(watch.steps, key=len)
        stats = llm.stats()
    print(
        f"block tables: {len(step)} sequences, {stats.counters.hits} of {stats.counters.queries} hit"
    )
    rows = sorted(step)
    holders = [block for *_, blocks in rows for block in blocks]
    width = max(len(blocks) for *_, blocks in rows)
    figure, axes = plt.subplots(figsize=(10, 2.7), layout="constrained")
    for row, (name, start, length, blocks) in enumerate(rows):
        for column, block in enumerate(blocks):
            is_open = (start + length) // 8 <= column
            shared = holders.count(block) > 1
            colour = OPEN if is_open else CACHED if shared else COMPUTED
            axes.add_patch(Rectangle((column, -row), 0.94, 0.84, color=colour))
            axes.text(column + 0.47, 0.42 - row, str(block), ha="center", va="center", color=INK)
        axes.text(-0.2, 0.42 - row, name.replace("request-", "request "), ha="right", va="center")
    axes.set(xlim=(-2.2, width), ylim=(-len(rows) + 0.9, 1.6), title="Block tables at one step")
    axes.text(0, 1.15, "positions 0-7", fontsize=9, color=INK)
    axes.text(width - 1, 1.15, f"{8 * width - 8}-{8 * width - 1}", fontsize=9, color=INK)
    axes.axis("off")
    legend = [(CACHED, "sealed, shared"), (COMPUTED, "sealed, own"), (OPEN, "open")]
    patches = [Patch(color=c, label=name) for c, name in legend]
    axes.legend(
        handles=patches, ncols=3, frameon=False, loc="lower right", bbox_to_anchor=(1, -0.16)
    )
    _save(figure, "block-tables.png")


def _save(figure: Any, name: str) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / name, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    work_with_and_without()
    conversation()
    block_tables()
