"""Cases about borders: where a window, a chunk or a position regime of the model ends.

The other cases' sequences are short, so that a model with a window of 512 tokens would never leave it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvern.check.lab import Lab
from kvern.check.names import Fault
from kvern.check.sheet import Case, CaseSkippedError, Sheet
from kvern.models.workspace import extra_widths, qkv_width
from kvern.spec.reach import Chunk, Window

MAX_QUICK_BORDER = 64
NUM_DECODED = 5

PASSES = 20
"""About how many times its border a case computes, in tokens, with the passes that it compares with."""

MAX_WORK, MAX_SLOW_WORK = 1e13, 2e12
"""Multiplications by weights that a case may take unless asked for more: minutes on two cores; fewer where
numpy computes."""

MAX_ACTIVATION_BYTES = 2 << 30
"""Of one full pass, likewise."""


def border_cases(lab: Lab) -> Iterator[Case]:
    """One case per border that the context reaches; the ones that take too long say so."""
    for border in _borders(lab):
        length = lab.fitting(2 * border + 3)
        if border < 2 or length <= border + 1:
            continue
        title = f"lengths around the border at {border} and up to {length}"
        reason = _too_much(lab, border, length)
        run = partial(_border, border, length) if reason is None else partial(_left_out, reason)
        yield Case(f"border-{border}", title, run)


def _borders(lab: Lab) -> list[int]:
    """Sizes of windows and chunks, and where rotations begin to depend on the length."""
    reaches = [group.spec.reach for group in lab.llm.model.kv_plan.groups]
    found = {reach.size for reach in reaches if isinstance(reach, Window | Chunk)}
    regimes = lab.llm.model.decoder.config.regimes
    if regimes is not None:
        found.add(regimes.border)
    return sorted(found)


def _too_much(lab: Lab, border: int, length: int) -> str | None:
    """Why a border is left out; None when it is tried."""
    flag = f"--max-border-tokens {border} includes it"
    if lab.oracle is not None and length > lab.oracle.limit:
        return f"{length:,} rows of logits of {lab.oracle.name} do not fit in 1 GiB"
    if lab.options.max_border is not None:
        return None if border <= lab.options.max_border else flag
    if lab.options.is_quick:
        return None if border <= MAX_QUICK_BORDER else f"left out by --quick: {flag}"
    work = PASSES * border * _weights_per_token(lab)
    limit = MAX_WORK if lab.llm.model.backend.name == "native" else MAX_SLOW_WORK
    if work > limit:
        return f"about {work:.0e} multiplications, {limit:.0e} are made unasked: {flag}"
    nbytes = length * _activation_bytes(lab)
    if nbytes > MAX_ACTIVATION_BYTES:
        return f"activations of {length:,} tokens take {nbytes / 2**30:.1f} GiB: {flag}"
    return None


def _weights_per_token(lab: Lab) -> int:
    """Elements that one token's computation uses; every row's logits are computed here."""
    parameters = lab.llm.model.spec.parameters
    return lab.llm.model.weights.nbytes if parameters is None else parameters.active


def _activation_bytes(lab: Lab) -> int:
    """Per token of a pass, of its largest layer."""
    config = lab.llm.model.decoder.config
    widths = [
        qkv_width(layer) + 3 * layer.intermediate_size + sum(extra_widths(layer).values())
        for layer in config.layers
    ]
    return 4 * (max(widths) + 5 * config.hidden_size)


def _left_out(reason: str, sheet: Sheet) -> None:
    raise CaseSkippedError(reason)


def _border(border: int, length: int, sheet: Sheet) -> None:
    """Lengths around the border and past twice of it: in company, token by token, behind hits, preempted."""
    main = sheet.lab.tokens(length, 60)
    sheet.prepare(main)
    _in_company(border, main, sheet)
    session = sheet.session(2 * len(main) + 64)
    session.submit("over", main[: max(border - 2, 1)], NUM_DECODED)
    session.finish()
    session.submit("head", main[: border + 1], 1)
    session.finish()
    if len(main) > 2 * border:
        session.submit("twice", main[: 2 * border - 2], NUM_DECODED)
        session.finish()
    session.submit("rest", main, NUM_DECODED)
    session.finish()
    if sheet.lab.llm.settings.enable_prefix_caching:
        sheet.note(f"'rest' hit {session.cached_tokens('rest')} of {len(main)} tokens")
    _preempted(border, main, sheet)


def _in_company(border: int, main: tuple[int, ...], sheet: Sheet) -> None:
    """All lengths side by side, in chunks of a third of the border."""
    lengths = [border - 1, border, border + 1, len(main)]
    session = sheet.session(
        sum(lengths) + 16 * len(lengths),
        enable_prefix_caching=False,
        max_chunk_tokens=max(border // 3, 1),
    )
    for length in lengths:
        session.submit(f"cold-{length}", main[:length], 1)
    session.finish()


def _preempted(border: int, main: tuple[int, ...], sheet: Sheet) -> None:
    """Blocks taken away before, at and behind the border: found again, and once computed again."""
    lab = sheet.lab
    session = sheet.session(border + lab.block_size + 64)
    session.submit("taken", main[: max(border - 2, 1)], NUM_DECODED)
    session.submit("beside", lab.tokens(min(border, 7), 61), NUM_DECODED + 4)
    for count in range(1, NUM_DECODED):
        session.run_until(lambda count=count: session.num_generated("taken") >= count)  # type: ignore[misc]
        session.preempt("taken", forget=count == NUM_DECODED // 2 + 1)
    session.finish()
    sheet.note(f"{session.num_preemptions()} preemptions")
    if session.num_preemptions() == 0:
        sheet.find(Fault.NO_RESULT, "the request could not be preempted", "counters")
