"""Cases about sharing: hits, tails, twins, preemption, forks, salts and neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvern.check.lab import Lab
from kvern.check.names import Fault
from kvern.check.session import Session
from kvern.check.sheet import Case, Sheet


def sharing_cases(lab: Lab) -> Iterator[Case]:
    """All of them; none when the user has switched the prefix cache off."""
    if not lab.llm.settings.enable_prefix_caching or lab.llm.settings.no_cache:
        return
    yield Case("full-hit", "the same prompt again", _full_hit)
    yield Case("partial-tail", "a prompt that parts inside a stored block", _partial_tail)
    yield Case("next-turn", "a conversation that goes on", _next_turn)
    yield Case("twins", "equal prompts in flight at once", _twins)
    yield Case("twin-aborted", "equal prompts in flight, the first one aborted", _twin_aborted)
    yield Case(
        "preempt", "a pool too small for all, and blocks taken away: preempt and resume", _preempt
    )
    yield Case("replaced", "a pool too small to keep all: blocks replaced", _replaced)
    yield Case("fork", "several samples of one prompt", _fork)
    yield Case("beams", "beam search", _beams)
    yield Case("salt", "equal prompts under different salts", _salt)
    yield Case(
        "neighbour-aborted", "a neighbour aborted in prefill and in decode", _neighbour_aborted
    )


def _least_hit(sheet: Sheet, num_shared: int) -> int:
    """What a repeat must find of a stored run: whole spans; nothing where states limit hits."""
    plan = sheet.lab.llm.model.kv_plan
    if any(group.is_state for group in plan.groups):
        return 0
    span = max(group.block_size for group in plan.groups)
    return num_shared // span * span


def _full_hit(sheet: Sheet) -> None:
    """Prompts that end at, before and behind a block's end, each twice."""
    lab, size = sheet.lab, sheet.lab.block_size
    session = sheet.session(12 * size + 64)
    for stream, length in enumerate((2 * size, 2 * size + 1, max(2 * size - 1, 2)), 30):
        prompt = lab.tokens(lab.fitting(length), stream)
        for number in range(2):
            session.submit(f"{'abc'[stream - 30]}{number}", prompt, 2)
            session.finish()
        least = _least_hit(sheet, len(prompt) - 1)
        sheet.expect_hit(session, f"{'abc'[stream - 30]}1", least, len(prompt))


def _partial_tail(sheet: Sheet) -> None:
    lab, size = sheet.lab, sheet.lab.block_size
    shared = size + (size + 1) // 2
    stored = lab.tokens(lab.fitting(2 * size + 3), 40)
    session = sheet.session(8 * size + 32)
    session.submit("stored", stored, 2)
    session.finish()
    for number, length in enumerate({shared, size + 1, 2 * size - 1}):
        own = lab.tokens(size + 2, 41 + number)
        prompt = stored[:length] + own
        session.submit(f"branch{number}", prompt, 3)
        session.finish()
        sheet.expect_hit(session, f"branch{number}", _least_hit(sheet, length), len(prompt))


def _next_turn(sheet: Sheet) -> None:
    lab, size = sheet.lab, sheet.lab.block_size
    history = lab.tokens(size + 3, 50)
    session = sheet.session(8 * size + 96)
    known = 0
    for turn in range(3):
        session.submit(f"turn{turn}", history, max(size // 2, 3))
        session.finish()
        if turn:
            sheet.expect_hit(session, f"turn{turn}", _least_hit(sheet, known), len(history))
        output = session.states[f"turn{turn}"].output
        answer = () if output is None else output.token_ids
        known = len(history) + len(answer) - 1
        history = history + answer + lab.tokens(5, 51 + turn)


def _twins(sheet: Sheet) -> None:
    lab, size = sheet.lab, sheet.lab.block_size
    prompt = lab.tokens(lab.fitting(3 * size + 2), 60)
    sheet.prepare(prompt)
    session = sheet.session(12 * size + 32, max_chunk_tokens=max(size // 2 + 1, 1))
    session.submit("first", prompt, 3)
    session.run_steps(2)
    session.submit("second", prompt, 3)
    session.submit("third", prompt + lab.tokens(4, 61), 3)
    session.finish()
    done = session.llm.work.tokens_processed
    alone = 3 * (len(prompt) + 2) + 4
    sheet.note(f"{done} tokens computed, {alone} without sharing")
    if done >= alone and _least_hit(sheet, len(prompt) - 1):
        sheet.find(
            Fault.NO_HIT,
            f"three twins computed {done} tokens, as many as without sharing",
            "counters",
        )


def _twin_aborted(sheet: Sheet) -> None:
    lab, size = sheet.lab, sheet.lab.block_size
    prompt = lab.tokens(lab.fitting(3 * size + 2), 62)
    session = sheet.session(12 * size + 32, max_chunk_tokens=max(size // 2 + 1, 1))
    session.submit("first", prompt, 3)
    session.run_steps(1)
    session.submit("second", prompt, 3)
    session.run_steps(2)
    session.abort("first")
    session.finish()


def _preempt(sheet: Sheet) -> None:
    """Prompts that fit together and answers that do not; then blocks taken away between two steps."""
    lab, size = sheet.lab, sheet.lab.block_size
    num_prompt, num_new = size + max(size // 2, 1), min(size, 64) + 4
    plan = lab.llm.model.kv_plan
    count = 3
    num_blocks = count * plan.pages_for(num_prompt, num_prompt) + len(plan.groups)
    num_blocks = max(num_blocks, plan.pages_for(num_prompt + num_new, num_prompt))
    session = sheet.session(0, num_blocks=num_blocks)
    for number in range(count):
        session.submit(f"r{number}", lab.tokens(num_prompt, 70 + number), num_new)
    session.finish()
    sheet.note(f"{session.num_preemptions()} preemptions in a pool of {num_blocks} blocks")
    _preempt_by_hand(num_prompt, num_new, sheet)


def _preempt_by_hand(num_prompt: int, num_new: int, sheet: Sheet) -> None:
    """In prefill and in decode, found again and computed again: whatever the model keeps."""
    lab = sheet.lab
    session = sheet.session(
        4 * (num_prompt + num_new) + 64, max_chunk_tokens=max(num_prompt // 3, 1)
    )
    for number in range(3):
        session.submit(f"h{number}", lab.tokens(num_prompt + number, 73 + number), num_new)
    session.run_steps(1)
    session.preempt("h0")
    session.run_steps(1)
    session.preempt("h1", forget=True)
    for number, forget in ((0, False), (2, True), (1, False), (0, True)):
        name = f"h{number}"
        done = session.num_generated(name)
        session.run_until(partial(_has_more, session, name, done))
        session.preempt(name, forget=forget)
    session.finish()
    sheet.note(f"{session.num_preemptions()} by hand")
    if session.num_preemptions() == 0:
        sheet.find(Fault.NO_RESULT, "no request could be preempted", "counters")


def _has_more(session: Session, name: str, count: int) -> bool:
    return session.num_generated(name) > count


def _replaced(sheet: Sheet) -> None:
    """More prompts than the pool keeps, twice around."""
    lab, size = sheet.lab, sheet.lab.block_size
    length = 2 * size + 1
    prompts = [lab.tokens(length, 80 + stream) for stream in range(4)]
    sheet.prepare(*prompts)
    plan = lab.llm.model.kv_plan
    session = sheet.session(0, num_blocks=2 * plan.pages_for(length + 2, length) + 1)
    for number in range(2):
        for place, prompt in enumerate(prompts):
            session.submit(f"{'abcd'[place]}{number}", prompt, 2)
            if place % 2:
                session.finish()
    session.finish()
    sheet.note(f"{session.llm.stats().replaced_blocks} blocks replaced")


def _fork(sheet: Sheet) -> None:
    lab, size = sheet.lab, sheet.lab.block_size
    prompt = lab.tokens(size + max(size // 2, 1), 90)
    session = sheet.session(16 * size + 64)
    session.submit("fork", prompt, size // 2 + 4, n=3, temperature=1.0, seed=7)
    session.submit("other", lab.tokens(5, 91), 6)
    session.finish()
    sheet.note("3 samples")


def _beams(sheet: Sheet) -> None:
    lab, size = sheet.lab, sheet.lab.block_size
    session = sheet.session(16 * size + 64)
    prompt = lab.tokens(size + max(size // 2, 1), 92)
    session.submit("beams", prompt, min(size, 8) + 2, beam_width=3)
    session.finish()
    sheet.note("3 beams")


def _salt(sheet: Sheet) -> None:
    """Each salt computes the prompt itself, and finds it the second time."""
    lab, size = sheet.lab, sheet.lab.block_size
    prompt = lab.tokens(2 * size + 3, 95)
    sheet.prepare(prompt)
    session = sheet.session(16 * size + 32)
    for number, salt in enumerate((None, "a", "b", "a", None)):
        name = f"salt-{salt}-{number}"
        session.submit(name, prompt, 2, cache_salt=salt)
        session.finish()
        found = session.cached_tokens(name)
        if number < 3 and found:
            sheet.find(
                Fault.SALT,
                f"request {name} is the first under its salt and found {found} tokens in the cache",
                "counters",
            )
        elif number >= 3:
            sheet.expect_hit(session, name, _least_hit(sheet, len(prompt) - 1), len(prompt))


def _neighbour_aborted(sheet: Sheet) -> None:
    lab, size = sheet.lab, sheet.lab.block_size
    session = sheet.session(12 * size + 64, max_chunk_tokens=max(size // 2, 1))
    session.submit("kept", lab.tokens(size + 1, 100), 12)
    session.submit("in-decode", lab.tokens(2, 101), 12)
    session.run_steps(2)
    session.submit("in-prefill", lab.tokens(2 * size + 1, 102), 4)
    session.run_steps(2)
    for name in ("in-prefill", "in-decode"):
        session.abort(name)
    session.submit("after", lab.tokens(size + 1, 103), 4)
    session.finish()
