"""Lengths as a distribution: how many requests really fit, and what reservation wastes.

A request of n tokens takes ceil(n / block_size) blocks per group at most, so what fits is a sum of
random block counts. It is simulated: requests are drawn from the trace, with replacement, until
the pool is full; the seed is fixed and stated.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvern.errors import FileFormatError, UsageError

SEED = 20_260_101
TRIALS = 1_000
MAX_DRAWS = 8_000_000

PROMPT_NAMES = (
    "input_length", "ContextTokens", "Request tokens", "prompt_tokens", "num_prompt_tokens",
    "input_tokens", "prompt_length", "prompt_len", "input_len", "prompt", "input", "in",
)  # fmt: skip
OUTPUT_NAMES = (
    "output_length", "GeneratedTokens", "Response tokens", "completion_tokens", "output_tokens",
    "num_output_tokens", "generated_tokens", "output_len", "completion_length", "output", "out",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths of a trace, in file order.

    Attributes:
        source: the file's name.
        layout: what it was recognised as.
        skipped: rows without usable lengths.
    """

    source: str
    layout: str
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    skipped: int = 0

    @property
    def totals(self) -> tuple[int, ...]:
        """Final length of every request."""
        return tuple(p + o for p, o in zip(self.prompts, self.outputs, strict=True))


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests fit at once.

    Attributes:
        fits: probability -> number of requests that fit with at least that probability.
        mean_based: what an estimate from the mean length says.
        too_long: share of requests that could never fit the pool, which were left out.
    """

    fits: dict[float, int]
    mean_based: int
    mean_tokens: float
    trials: int
    seed: int
    too_long: float

    @property
    def mean_error(self) -> int:
        """By how many requests the mean-based estimate exceeds what fits with 99 %."""
        return self.mean_based - self.fits[0.99]


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Share of the memory taken that holds a token's keys and values, by way of reserving.

    Attributes:
        by_maximum: every request reserves the longest length.
        by_power_of_two: its length rounded up to a power of two.
        by_exact_length: its final length, known in advance; what is not yet written is idle.
        paging: whole blocks for the tokens that exist.
    """

    by_maximum: float
    by_power_of_two: float
    by_exact_length: float
    paging: float
    max_len: int


# ------------------------------------------------------------------------------------- loading


def load_lengths(path: str | Path) -> Lengths:
    """Reads a trace: Mooncake or Bailian JSONL, Azure or BurstGPT CSV, agent sessions, or plain.

    A CSV needs a header with a prompt and an output column, or two plain columns of numbers; a
    JSONL line needs a prompt and an output length, text lengths not counted.

    Raises:
        UsageError: the file does not exist.
        FileFormatError: no lengths were found in it.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"no such file: {file} (--lengths takes a trace, a CSV or a JSONL)")
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    stripped = text.lstrip()
    if file.suffix == ".csv" or (stripped and stripped[0] not in "[{"):
        rows, layout = _csv_rows(text), "CSV"
    else:
        rows, layout = _json_rows(text, file)
    prompts: list[int] = []
    outputs: list[int] = []
    skipped = 0
    for row in rows:
        pair = _pair(row)
        if pair is None:
            skipped += 1
            continue
        prompts.append(pair[0])
        outputs.append(pair[1])
    if not prompts:
        raise FileFormatError(
            f"{file.name} has no rows with a prompt and an output length: name the columns "
            "input_length and output_length"
        )
    return Lengths(file.name, layout, tuple(prompts), tuple(outputs), skipped)


def _csv_rows(text: str) -> Iterable[dict[str, Any]]:
    lines = text.splitlines()
    if not lines:
        return
    first = next(csv.reader(lines[:1]))
    if all(_number(cell) is not None for cell in first):
        for cells in csv.reader(lines):
            yield {"input_length": cells[0], "output_length": cells[1] if len(cells) > 1 else 0}
        return
    yield from csv.DictReader(lines)


def _json_rows(text: str, file: Path) -> tuple[list[dict[str, Any]], str]:
    try:
        document = json.loads(text)
    except ValueError:
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FileFormatError(f"{file.name}, line {number}: not JSON ({error})") from None
            if isinstance(row, dict):
                rows.append(row)
        return rows, "JSONL"
    if isinstance(document, dict) and isinstance(document.get("requests"), list):
        return [row for row in document["requests"] if isinstance(row, dict)], "agent session"
    if isinstance(document, list):
        return [row for row in document if isinstance(row, dict)], "JSON"
    return [document] if isinstance(document, dict) else [], "JSONL"


def _pair(row: dict[str, Any]) -> tuple[int, int] | None:
    usage = row.get("usage")
    merged = {**row, **usage} if isinstance(usage, dict) else row
    prompt = _first(merged, PROMPT_NAMES)
    if prompt is None and isinstance(merged.get("prompt_token_ids"), list):
        prompt = len(merged["prompt_token_ids"])
    output = _first(merged, OUTPUT_NAMES)
    if prompt is None or prompt < 1:
        return None
    return prompt, max(output or 0, 0)


def _first(row: dict[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        value = _number(row.get(name))
        if value is not None:
            return value
    return None


def _number(value: Any) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return None


# ----------------------------------------------------------------------------------- simulation


def simulate_concurrency(
    totals: Sequence[int],
    blocks_of: Callable[[int], int],
    pool_blocks: int,
    seed: int = SEED,
) -> Concurrency:
    """How many requests fit a pool at once, with 50, 90 and 99 % probability.

    Args:
        totals: final lengths to draw from.
        blocks_of: blocks that a request of a length holds at most.
        pool_blocks: blocks that requests can use.
        seed: of the generator; the same seed gives the same answer.
    """
    table = {length: blocks_of(length) for length in set(totals)}
    blocks = [table[length] for length in totals]
    usable = [b for b in blocks if b <= pool_blocks]
    if not usable:
        raise UsageError(
            f"no request of the trace fits the pool of {pool_blocks:,} blocks: the shortest needs "
            f"{min(blocks):,}"
        )
    mean = sum(usable) / len(usable)
    expected = max(pool_blocks / mean, 1.0)
    trials = max(min(TRIALS, int(MAX_DRAWS / (1.3 * expected + 10))), 20)
    generator = random.Random(seed)
    counts = sorted(_one_trial(generator, usable, pool_blocks, expected) for _ in range(trials))
    fits = {p: counts[min(int(trials * (1 - p)), trials - 1)] for p in (0.5, 0.9, 0.99)}
    mean_tokens = sum(totals) / len(totals)
    estimate = pool_blocks // max(blocks_of(max(round(mean_tokens), 1)), 1)
    return Concurrency(
        fits=fits,
        mean_based=estimate,
        mean_tokens=mean_tokens,
        trials=trials,
        seed=seed,
        too_long=1 - len(usable) / len(blocks),
    )


def _one_trial(
    generator: random.Random, blocks: Sequence[int], pool_blocks: int, expected: float
) -> int:
    """Requests that fit before the first one that does not."""
    held = count = 0
    size = int(expected * 1.3) + 10
    while True:
        for total in accumulate(generator.choices(blocks, k=size), initial=held):
            if total > pool_blocks:
                return count - 1
            count += 1
        held = total
        count -= 1


def utilisation(
    lengths: Lengths, block_size: int, max_len: int, sample: int = 20_000
) -> Utilisation:
    """Memory that holds something, averaged over a request's life, four ways of reserving.

    A request lives one step per output token; at step t it holds prompt + t tokens.
    """
    used = by_max = by_pow2 = by_exact = paged = 0.0
    step = max(len(lengths.prompts) // sample, 1)
    for prompt, output in zip(lengths.prompts[::step], lengths.outputs[::step], strict=True):
        final = prompt + output
        life = output + 1
        written = life * prompt + output * (output + 1) / 2
        used += written
        by_max += life * max(max_len, final)
        by_pow2 += life * (1 << (final - 1).bit_length())
        by_exact += life * final
        paged += _paged_slots(prompt, output, block_size)
    return Utilisation(used / by_max, used / by_pow2, used / by_exact, used / paged, max_len)


def _paged_slots(prompt: int, output: int, block_size: int) -> float:
    """Slots held, summed over the steps prompt, prompt + 1, ..., prompt + output tokens."""

    def up_to(n: int) -> int:
        # sum of ceil(i / b) * b for i in 1..n
        full, rest = divmod(n, block_size)
        return block_size * (block_size * full * (full + 1) // 2 + rest * (full + 1))

    return float(up_to(prompt + output) - up_to(prompt - 1))
