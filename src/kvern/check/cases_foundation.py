"""Cases that everything else rests on: the full pass is a model's answer, and the same one every time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvern.check.against import EXACT_MARGIN, TOLERANCE, margins_of
from kvern.check.compare import F32, INFINITE, compare
from kvern.check.dense import Replay
from kvern.check.lab import Lab
from kvern.check.names import Fault
from kvern.check.sheet import Case, Sheet
from kvern.check.uncached import UncachedRow
from kvern.spec.reach import All

EXACT_LIMIT, NARROW_LIMIT, QUANTISED_LIMIT = TOLERANCE, 5e-2, 0.5
"""Share of the range by which the full pass may differ from the independent one.

Both use the same matrix products, so with float32 keys and values only attention's own rounding is left.
Where keys, values or activations are rounded to fewer bits, a difference in the last bit moves some of them by
a whole step, and deep models spread that: then the distributions must still have the same shape.
"""

NARROW_MARGIN = 2e-2
"""As `EXACT_MARGIN`, where keys, values or activations are rounded to fewer bits."""

LEAST_CORRELATION = 0.98
"""Of every row's logits with the independent ones."""


def foundation_cases(lab: Lab) -> Iterator[Case]:
    """Both; they come first, because the others compare with what they establish."""
    length = lab.within_first_regime(lab.fitting(min(max(35, 2 * lab.block_size + 3), 130)))
    tokens = lab.tokens(length)

    def full_pass(sheet: Sheet) -> None:
        _full_pass(tokens, sheet)

    def repeat(sheet: Sheet) -> None:
        _repeat(tokens, sheet)

    yield Case("full-pass", "one full pass, against a computation without any cache", full_pass)
    yield Case("repeat", "the same full pass a second time", repeat)


def _full_pass(tokens: Sequence[int], sheet: Sheet) -> None:
    lab = sheet.lab
    lab.uncached.prepare(tokens)
    rows = _rows(lab, tokens)
    sheet.num_compared = len(rows)
    if len(rows) < len(tokens):
        sheet.find(
            Fault.NO_RESULT,
            f"a full pass over {len(tokens)} tokens gave {len(rows)} rows of logits",
        )
        return
    logits = np.stack([row.logits for row in rows if row.logits is not None])
    if not np.isfinite(logits).all():
        first = int(np.argmin(np.isfinite(logits).all(axis=1)))
        sheet.find(
            Fault.NOT_FINITE,
            f"the full pass gives logits that are not finite from position {first} on",
        )
        return
    if _is_degenerate(lab, tokens, logits, sheet):
        return
    with margins_of(lab.llm.model.decoder, len(tokens)) as margins:
        dense = lab.dense.logits(Replay(tuple(tokens)), list(range(len(tokens))))
    is_exact = _limit(lab) == EXACT_LIMIT
    num_clear = margins.first_unclear(EXACT_MARGIN if is_exact else NARROW_MARGIN)
    if num_clear < len(tokens):
        sheet.note(f"{len(tokens) - num_clear} positions behind a near tie of experts left out")
    if num_clear:
        _compare_with_dense(lab, logits[:num_clear], dense[:num_clear], sheet)


def _compare_with_dense(lab: Lab, logits: F32, dense: F32, sheet: Sheet) -> None:
    correlations = [
        float(np.corrcoef(own, other)[0, 1]) for own, other in zip(logits, dense, strict=True)
    ]
    for position, (own, other) in enumerate(zip(logits, dense, strict=True)):
        difference = compare(own, other)
        if difference.relative > sheet.difference.relative:
            sheet.difference, sheet.position = difference, position
    lab.noise = sheet.difference.relative
    lab.noise_rms = float(np.sqrt(np.mean((logits - dense).astype(np.float64) ** 2)))
    limit = _limit(lab)
    least = min(correlations)
    sheet.note(f"limit {limit:.0e} of the range, least correlation {least:.4f}")
    if not (lab.noise <= limit and least >= LEAST_CORRELATION):
        sheet.find(
            Fault.FULL_PASS,
            f"the full pass differs from the independent computation by {lab.noise:.1e} of the range at "
            f"position {sheet.position} ({limit:.0e} is allowed; least correlation {least:.4f}): attention, "
            "positions or the stored form are wrong even without reuse",
        )


def _limit(lab: Lab) -> float:
    if lab.has_quantised_products:
        return QUANTISED_LIMIT
    return EXACT_LIMIT if lab.stored_dtypes == {"fp32"} else NARROW_LIMIT


def _rows(lab: Lab, tokens: Sequence[int]) -> list[UncachedRow]:
    found = (lab.uncached.find(int(node)) for node in lab.contexts.path(tokens))
    return [row for row in found if row is not None]


def _is_degenerate(lab: Lab, tokens: Sequence[int], logits: F32, sheet: Sheet) -> bool:
    """Whether the engine could pass every comparison by saying the same thing always."""
    if (logits.max(axis=1) == logits.min(axis=1)).any():
        sheet.find(Fault.DEGENERATE, "all logits of a position are equal")
    elif len({row.tobytes() for row in logits}) < len(logits):
        sheet.find(Fault.DEGENERATE, "different positions have the same logits")
    else:
        changed = _changed_position(lab, len(tokens))
        other = list(tokens)
        other[changed] = (other[changed] + 1) % lab.llm.model.decoder.config.vocab_size
        lab.uncached.prepare(other)
        rows = _rows(lab, other)
        if not rows or np.array_equal(rows[-1].logits, logits[-1]):  # type: ignore[arg-type]
            sheet.find(
                Fault.DEGENERATE,
                f"the logits at position {len(tokens) - 1} stay the same when the token at {changed} "
                "changes: the past is not attended to",
            )
    return bool(sheet.findings)


def _changed_position(lab: Lab, num_tokens: int) -> int:
    """The earliest position that the last one must feel, whatever the layers' windows."""
    reaches = [group.spec.reach for group in lab.llm.model.kv_plan.groups]
    return 0 if any(isinstance(reach, All) for reach in reaches) else max(num_tokens - 2, 0)


def _repeat(tokens: Sequence[int], sheet: Sheet) -> None:
    lab = sheet.lab
    first = {int(node): lab.uncached.find(int(node)) for node in lab.contexts.path(tokens)}
    for row_number, (node, again) in enumerate(lab.full_pass(tokens).items()):
        before = first.get(node)
        difference = INFINITE
        if before is not None and before.logits is not None and again.logits is not None:
            difference = compare(again.logits, before.logits)
        sheet.num_compared += 1
        if difference.relative > sheet.difference.relative:
            sheet.difference, sheet.position = difference, row_number
    if sheet.num_compared < len(tokens):
        sheet.find(
            Fault.NO_RESULT, f"the pass gave {sheet.num_compared} rows for {len(tokens)} tokens"
        )
    if np.isfinite(sheet.difference.relative) and not sheet.difference.is_within(lab.tolerance):
        lab.is_random = True
        sheet.find(
            Fault.RANDOMNESS,
            f"the same {len(tokens)} tokens from an empty cache gave logits that differ by "
            f"{sheet.difference.largest:.3g} at position {sheet.position} the second time",
        )
    elif not np.isfinite(sheet.difference.relative):
        sheet.find(
            Fault.NOT_FINITE, f"position {sheet.position} is not finite in one of two equal passes"
        )
