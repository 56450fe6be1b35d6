"""Cases about computing: the same tokens in one pass, token by token, in chunks, in company."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from kvern.check.lab import Lab
from kvern.check.names import Fault
from kvern.check.sheet import Case, Sheet

NUM_DECODED = 3
MAX_BLOCK_FOR_24_ORDERS = 64
"""With larger blocks three prompts are enough: the cases' lengths grow with the block."""

TEXT = "A key-value cache keeps what attention has computed for earlier tokens, so that"


def compute_cases(lab: Lab) -> Iterator[Case]:
    """All of them, with sizes that follow from the block size."""
    size, is_quick = lab.block_size, lab.options.is_quick
    length = lab.fitting(max(35, 2 * size + 3) if is_quick else max(150, 2 * size + 17))
    main = lab.tokens(length)
    yield Case("decode", "prefill, then token by token", partial(_decode, main))
    for chunk in _chunk_sizes(size, length, is_quick):
        yield Case(f"chunk-{chunk}", f"prompt in chunks of {chunk}", partial(_chunked, main, chunk))
    yield Case("chunk-all", "prompt in one chunk", partial(_chunked, main, length))
    if lab.llm.model.tokenizer is not None:
        yield Case("text", "a text, in chunks and continued", _text)
    yield Case("orders", "batches of unequal lengths in every order", _orders)
    yield Case("join-leave", "requests that end and join midway", _join_and_leave)
    yield Case("work", "work done with and without the cache", _work)


def _chunk_sizes(block_size: int, length: int, is_quick: bool) -> list[int]:
    sizes = {1, 2, 3, 7, block_size - 1, block_size, block_size + 1, 64}
    if is_quick:
        sizes -= {2, 3, 64}
    return sorted(size for size in sizes if 0 < size < length)


def _decode(main: Sequence[int], sheet: Sheet) -> None:
    """A short prompt, then enough single tokens to fill a block and to begin another."""
    lab = sheet.lab
    prompt = main[: lab.fitting(lab.block_size + 1)]
    num_new = min(lab.block_size, 32) + 4
    session = sheet.session(len(prompt) + num_new)
    session.submit("a", prompt, num_new)
    session.finish()


def _chunked(main: Sequence[int], chunk: int, sheet: Sheet) -> None:
    sheet.prepare(main)
    session = sheet.session(
        len(main) + NUM_DECODED, max_chunk_tokens=chunk, max_num_batched_tokens=chunk
    )
    session.submit("a", main, NUM_DECODED)
    session.finish()


def _text(sheet: Sheet) -> None:
    """What people send: special tokens and likely continuations, unlike tokens drawn at random."""
    tokens = sheet.lab.llm.token_ids(TEXT).tolist()
    session = sheet.session(len(tokens) + 16, max_chunk_tokens=5)
    session.submit("text", tokens, 8)
    session.finish()
    output = session.states["text"].output
    sheet.note(repr(output.text) if output is not None else "")


def _orders(sheet: Sheet) -> None:
    lab, size = sheet.lab, sheet.lab.block_size
    num_prompts = 3 if lab.options.is_quick or size > MAX_BLOCK_FOR_24_ORDERS else 4
    lengths = [1, size + 1, 7, 2 * size - 1][:num_prompts]
    prompts = [lab.tokens(lab.fitting(length), stream) for stream, length in enumerate(lengths, 1)]
    sheet.prepare(*prompts)
    session = sheet.session(sum(lengths) + 8 * size, enable_prefix_caching=False)
    orders = list(itertools.permutations(range(len(prompts))))
    for number, order in enumerate(orders):
        for place in order:
            session.submit(f"{'abcd'[place]}{number}", prompts[place], 2)
        session.finish()
    sheet.note(f"{len(orders)} orders of {len(prompts)} requests")


def _join_and_leave(sheet: Sheet) -> None:
    """The engine's very first step has one row; whatever it learns from that must hold for more."""
    lab, size = sheet.lab, sheet.lab.block_size
    plans = [  # name, prompt length, new tokens, step of arrival
        ("a", 1, 7, 0),
        ("b", size + 2, 12, 1),
        ("c", 3, 2, 1),
        ("d", 2 * size, 5, 2),
        ("e", max(size - 1, 1), 3, 5),
    ]
    session = sheet.session(
        8 * size + 64, enable_prefix_caching=False, max_chunk_tokens=max(size // 2, 1)
    )
    for step in range(6):
        for stream, (name, length, num_new, arrival) in enumerate(plans, 10):
            if arrival == step:
                session.submit(name, lab.tokens(lab.fitting(length), stream), num_new)
        session.run_steps(1)
    session.finish()
    sheet.note(f"{len(plans)} requests")


def _work(sheet: Sheet) -> None:
    """N tokens from a prompt of P: P + N - 1 with the cache, P + (P + 1) + ... without."""
    lab = sheet.lab
    num_prompt, num_new = lab.fitting(lab.block_size + 5), 5
    prompt = lab.tokens(num_prompt, 20)
    for is_cached in (True, False):
        session = sheet.session(num_prompt + num_new, no_cache=not is_cached)
        session.submit("a", prompt, num_new)
        session.finish()
        wanted = (
            num_prompt + num_new - 1 if is_cached else sum(range(num_prompt, num_prompt + num_new))
        )
        how = "with" if is_cached else "without"
        done = session.llm.work.tokens_processed
        sheet.note(f"{done:,} tokens {how} the cache")
        output = session.states["a"].output
        if done != wanted and output is not None and output.error is None:
            sheet.find(
                Fault.ACCOUNTING,
                f"{num_new} tokens from a prompt of {num_prompt} took {done:,} tokens {how} the cache "
                f"instead of {wanted:,}",
                "counters",
            )
