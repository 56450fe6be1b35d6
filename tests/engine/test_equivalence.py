"""The equivalence matrix on the real model: whatever the cache does, the answer is that of one full pass.

    {cold, warm, partial tail, in-flight twin, preempted and resumed, forked, batched with 15 others,
     aborted neighbour} x {block size 1, 4, 16, 32} x {chunk 1, 16, 512}

Every logit of every computed position is compared: equal bits on the native backend; on the reference backend
within 1e-4 of the row's range (float32 cache), and with the same greedy tokens. The doctor's sessions watch the
engines meanwhile, so block tables, sealed pages and counters are verified in each cell too.

The same for int8, where the full pass follows the same rule: a token's own block as computed, earlier ones as
stored. Hits end at block borders there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvern import LLM
from kvern.check.compare import NO_DIFFERENCE
from kvern.check.lab import CheckOptions, Lab
from kvern.check.session import Session

BLOCK_SIZES, CHUNKS = (1, 4, 16, 32), (1, 16, 512)
NUM_NEW = 4
REFERENCE_TOLERANCE = 1e-4

GetLab = Callable[..., Lab]


@pytest.fixture(scope="module")
def get_lab(smollm2_path: Path) -> Iterator[GetLab]:
    """One lab per backend and block size over one set of weights each: full passes are computed once."""
    engines: dict[str, LLM] = {}
    labs: dict[tuple[str, int, str], Lab] = {}

    def get(backend: str, block_size: int, kv_format: str | None = None) -> Lab:
        options = {"backend": backend, "kv_memory": "64MiB", "max_model_len": 1024}
        options["kv_format"] = kv_format or ("fp32" if backend == "reference" else "bf16")
        key = backend, block_size, options["kv_format"]
        if backend not in engines:
            engines[backend] = LLM(smollm2_path, **options)
        if key not in labs:
            base = engines[backend]
            llm = LLM(smollm2_path, share_weights_with=base, block_size=block_size, **options)
            labs[key] = Lab(llm, CheckOptions())
        return labs[key]

    yield get
    for llm in (*(lab.llm for lab in labs.values()), *engines.values()):
        llm.close()


def prompt_of(lab: Lab, stream: int = 0) -> tuple[int, ...]:
    """Two blocks and a part of a third, at least 21 tokens."""
    return lab.tokens(max(2 * lab.block_size + 5, 21), stream)


def longest_hit(lab: Lab, num_shared: int) -> int:
    """Of so many stored tokens: narrow formats share whole blocks alone."""
    is_narrow = any(group.is_narrow for group in lab.llm.model.kv_plan.groups)
    return num_shared // lab.block_size * lab.block_size if is_narrow else num_shared


def open_session(lab: Lab, chunk: int, num_tokens: int = 0, **settings) -> Session:
    room = max(num_tokens, 6 * len(prompt_of(lab)) + 64)
    return lab.session(room, max_chunk_tokens=chunk, max_num_batched_tokens=512, **settings)


def cold(lab: Lab, chunk: int) -> Session:
    session = open_session(lab, chunk)
    session.submit("a", prompt_of(lab), NUM_NEW)
    session.finish()
    return session


def warm(lab: Lab, chunk: int) -> Session:
    session, prompt = open_session(lab, chunk), prompt_of(lab)
    for name in ("first", "again"):
        session.submit(name, prompt, NUM_NEW)
        session.finish()
    assert session.cached_tokens("first") == 0
    assert session.cached_tokens("again") == longest_hit(lab, len(prompt) - 1)
    return session


def partial_tail(lab: Lab, chunk: int) -> Session:
    session, prompt = open_session(lab, chunk), prompt_of(lab)
    num_shared = lab.block_size + (lab.block_size + 1) // 2
    session.submit("stored", prompt, 1)
    session.finish()
    session.submit("branch", prompt[:num_shared] + lab.tokens(7, 1), NUM_NEW)
    session.finish()
    assert session.cached_tokens("branch") == longest_hit(lab, num_shared)
    return session


def in_flight_twin(lab: Lab, chunk: int) -> Session:
    session, prompt = open_session(lab, chunk), prompt_of(lab)
    session.submit("first", prompt, NUM_NEW)
    session.run_steps(1)
    session.submit("second", prompt, NUM_NEW)
    session.submit("third", prompt + lab.tokens(3, 2), NUM_NEW)
    session.finish()
    return session


def preempted(lab: Lab, chunk: int) -> Session:
    """Three prompts fill the pool but for one block, and every answer needs another block."""
    size, plan = lab.block_size, lab.llm.model.kv_plan
    num_prompt, num_new = size + size // 2 + 1, size + 2
    num_blocks = max(3 * plan.pages_for(num_prompt) + 1, plan.pages_for(num_prompt + num_new))
    session = open_session(lab, chunk, num_blocks=num_blocks)
    for number in range(3):
        session.submit(f"r{number}", lab.tokens(num_prompt, 10 + number), num_new)
    session.finish()
    assert session.num_preemptions() > 0
    return session


def forked(lab: Lab, chunk: int) -> Session:
    session = open_session(lab, chunk)
    session.submit("fork", prompt_of(lab), NUM_NEW + 2, n=3, temperature=1.0, seed=11)
    session.finish()
    assert session.num_generated("fork") == 3 * (NUM_NEW + 2)
    return session


def batched(lab: Lab, chunk: int) -> Session:
    """With 15 others of 1 to 15 tokens, which join three at a time."""
    session = open_session(lab, chunk, num_tokens=16 * (lab.block_size + 40))
    session.submit("a", prompt_of(lab), NUM_NEW)
    for number in range(1, 16):
        session.submit(f"other{number}", lab.tokens(number, 20 + number), NUM_NEW)
        if number % 3 == 0:
            session.run_steps(1)
    session.finish()
    return session


def aborted_neighbour(lab: Lab, chunk: int) -> Session:
    session = open_session(lab, chunk)
    session.submit("kept", prompt_of(lab), NUM_NEW + 2)
    session.submit("aborted", prompt_of(lab, 50), NUM_NEW)
    session.run_steps(2)
    session.abort("aborted")
    session.submit("after", prompt_of(lab, 50), NUM_NEW)
    session.finish()
    return session


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        cold,
        warm,
        partial_tail,
        in_flight_twin,
        preempted,
        forked,
        batched,
        aborted_neighbour,
    )
}
PAIRS = list(itertools.product(BLOCK_SIZES, CHUNKS))
EVERY_CELL = [(name, *pair) for name in SCENARIOS for pair in PAIRS]
COVERING = [(list(SCENARIOS)[number % len(SCENARIOS)], *pair) for number, pair in enumerate(PAIRS)]
"""Every scenario at least once and every pair of block size and chunk exactly once."""
OTHER_CELLS = [cell for cell in EVERY_CELL if cell not in COVERING]

ON_REFERENCE = [("partial_tail", 16, 16), ("preempted", 4, 512)]
MIX = "int8;0-1,29=bf16"
IN_INT8 = [
    *[(name, *pair, "int8") for name, *pair in COVERING],
    ("in_flight_twin", 64, 16, "int8"),
    ("preempted", 64, 512, "int8"),
    ("forked", 64, 1, "int8"),
    ("forked", 16, 512, MIX),
    ("preempted", 16, 16, MIX),
    ("batched", 32, 512, MIX),
]


def expect_equal_bits(
    get_lab: GetLab, name: str, block_size: int, chunk: int, kv_format: str | None = None
) -> None:
    session = SCENARIOS[name](get_lab("native", block_size, kv_format), chunk)
    session.close()
    assert session.findings == []
    assert len(session.watch.rows) > 0
    different = [row for row in session.watch.rows if row.difference != NO_DIFFERENCE]
    assert different == []


@pytest.mark.parametrize(("name", "block_size", "chunk"), COVERING)
def test_covering_cells_are_bit_identical(
    require_native: None, get_lab: GetLab, name: str, block_size: int, chunk: int
) -> None:
    expect_equal_bits(get_lab, name, block_size, chunk)


@pytest.mark.full
@pytest.mark.parametrize(("name", "block_size", "chunk"), OTHER_CELLS)
def test_every_other_cell_is_bit_identical(
    require_native: None, get_lab: GetLab, name: str, block_size: int, chunk: int
) -> None:
    expect_equal_bits(get_lab, name, block_size, chunk)


@pytest.mark.parametrize(("name", "block_size", "chunk", "kv_format"), IN_INT8)
def test_cells_in_int8_are_bit_identical(
    require_native: None,
    get_lab: GetLab,
    name: str,
    block_size: int,
    chunk: int,
    kv_format: str,
) -> None:
    expect_equal_bits(get_lab, name, block_size, chunk, kv_format)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "block_size", "chunk", "kv_format"),
    [(*cell, kv_format) for kv_format in ("int8", MIX) for cell in EVERY_CELL
     if (*cell, kv_format) not in IN_INT8],
)  # fmt: skip
def test_every_other_cell_in_int8_is_bit_identical(
    require_native: None,
    get_lab: GetLab,
    name: str,
    block_size: int,
    chunk: int,
    kv_format: str,
) -> None:
    expect_equal_bits(get_lab, name, block_size, chunk, kv_format)


def expect_close_with_equal_tokens(get_lab: GetLab, name: str, block_size: int, chunk: int) -> None:
    lab = get_lab("reference", block_size)
    session = SCENARIOS[name](lab, chunk)
    session.close()
    assert session.findings == []
    for row in session.watch.rows:
        assert row.difference is not None
        assert row.difference.relative < REFERENCE_TOLERANCE
    for state in session.states.values():
        output = state.output
        if output is None or output.finish_reason == "abort" or len(output.choices) > 1:
            continue
        for number, token in enumerate(output.token_ids):
            context = (*output.prompt_token_ids, *output.token_ids[:number])
            uncached = lab.uncached.get(int(lab.contexts.path(context)[-1]))
            assert uncached is not None
            assert token == int(uncached.logits.argmax())


@pytest.mark.parametrize(("name", "block_size", "chunk"), ON_REFERENCE)
def test_reference_cells_are_close_with_equal_tokens(
    get_lab: GetLab, name: str, block_size: int, chunk: int
) -> None:
    expect_close_with_equal_tokens(get_lab, name, block_size, chunk)


@pytest.mark.parametrize(("name", "block_size", "chunk"), ON_REFERENCE)
def test_reference_cells_in_int8_stay_within_their_tolerance(
    get_lab: GetLab, name: str, block_size: int, chunk: int
) -> None:
    lab = get_lab("reference", block_size, "int8")
    session = SCENARIOS[name](lab, chunk)
    session.close()
    assert session.findings == []
    assert session.watch.rows
    for row in session.watch.rows:
        assert row.difference is not None
        assert row.difference.relative < lab.tolerance


@pytest.mark.full
@pytest.mark.parametrize(("name", "block_size", "chunk"), COVERING)
def test_covering_cells_on_the_reference_backend(
    get_lab: GetLab, name: str, block_size: int, chunk: int
) -> None:
    expect_close_with_equal_tokens(get_lab, name, block_size, chunk)
