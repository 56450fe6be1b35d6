"""From wrong logits to a name: which known fault gives exactly these?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvern.check.compare import F32, spread
from kvern.check.dense import Replay
from kvern.check.hypotheses import Other, Suspect, hypotheses
from kvern.check.lab import Lab
from kvern.check.names import Fault, Finding
from kvern.check.session import Session
from kvern.check.watch import Row, SequenceNote

MAX_ROWS = 24
"""Rows of a sequence that a replay is compared on."""

MAX_UNEXPLAINED = 0.15
"""A replay names a fault when it leaves at most this share of what a right replay leaves."""

GOOD_ENOUGH = 0.02
"""No better replay is looked for below this share."""

LAST_BITS = 1e-2
"""Share of the range below which a difference that no replay explains is one of rounding."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Rows of one sequence, ``[rows, vocab_size]``: what the engine said, and what a right replay says.

    The right replay stands for the uncached rows here, so that both sides of a comparison have the same
    rounding.
    """

    positions: list[int]
    observed: F32
    right: F32


def wrong_rows(lab: Lab, session: Session) -> list[Row]:
    """Rows outside the tolerance, in the order of computing."""
    return [
        row
        for row in session.watch.rows
        if row.difference is not None and not row.difference.is_within(lab.tolerance)
    ]


def diagnose(lab: Lab, session: Session, rerun: Callable[[], Session | None]) -> list[Finding]:
    """Name what made rows of a session wrong.

    Args:
        lab: for replays.
        session: a closed session with wrong rows.
        rerun: carries the case out once more and gives the session in the same place, or None.
    """
    rows = wrong_rows(lab, session)
    if not rows:
        return []
    if lab.is_random:
        return [Finding(Fault.RANDOMNESS, "the same input gives different logits each time", "comparison")]
    again = rerun()
    differing = None if again is None else _first_unequal(lab, rows, wrong_rows(lab, again))
    if differing is not None:
        sentence = f"carried out twice, the case gives different logits at {_place(differing)}"
        return [Finding(Fault.RANDOMNESS, sentence, "comparison")]
    finite = [row for row in rows if row.logits is not None and np.isfinite(row.logits).all()]
    if not finite:
        return [_not_finite(lab, session, rows[0])]
    return [_replayed(lab, session, finite)]


def _place(row: Row) -> str:
    return f"position {row.position} of request {row.request_id}"


def _first_unequal(lab: Lab, rows: Sequence[Row], again: Sequence[Row]) -> Row | None:
    """A wrong row that came out differently the second time."""
    others = {(row.request_id, row.position, row.step): row for row in again}
    for row in rows:
        other = others.get((row.request_id, row.position, row.step))
        if other is None or other.logits is None or row.logits is None:
            return row
        if not np.array_equal(row.logits, other.logits, equal_nan=True):
            distance = np.nanmax(np.abs(row.logits - other.logits)) / spread(row.logits)
            if not distance <= lab.tolerance:
                return row
    return None


def _not_finite(lab: Lab, session: Session, row: Row) -> Finding:
    known = lab.uncached.find(row.node)
    is_right_finite = known is not None and bool(np.isfinite(known.logits).all())
    if not is_right_finite:
        return Finding(Fault.NOT_FINITE, f"logits are not finite at {_place(row)}", "comparison")
    note = session.watch.notes[row.seq_id]
    fault = Fault.TOKENS_LOST if _was_resumed(note) else Fault.UNWRITTEN
    return Finding(
        fault,
        f"logits are not finite at {_place(row)}, and are without the cache: it has read slots without "
        "content (pages without content are filled with NaN)",
        "comparison",
    )


def _rounding(rows: Sequence[Row]) -> Finding:
    worst = max(rows, key=lambda row: row.difference.relative if row.difference else 0.0)
    assert worst.difference is not None
    return Finding(
        Fault.ROUNDING,
        f"{len(rows)} positions differ in the last bits (at most {worst.difference.relative:.1e} of the range, "
        f"at {_place(worst)}): an operation adds in an order that depends on the rows beside it",
        "comparison",
    )


def _replayed(lab: Lab, session: Session, rows: Sequence[Row]) -> Finding:
    """The hypothesis that explains the first wrong sequence best."""
    seq_id = rows[0].seq_id
    note = session.watch.notes[seq_id]
    evidence = _evidence(lab, session, seq_id)
    suspect = _suspect(lab, session, note, min(row.position for row in rows if row.seq_id == seq_id))
    best: tuple[float, Fault, str] | None = None
    for hypothesis in hypotheses(suspect):
        indices = [position + hypothesis.shift for position in evidence.positions]
        usable = [i for i, index in enumerate(indices) if 0 <= index < len(hypothesis.replay.tokens)]
        if not usable:
            continue
        logits = lab.dense.logits(hypothesis.replay, [indices[i] for i in usable])
        share = _unexplained(evidence.observed[usable], evidence.right[usable], logits)
        if best is None or share < best[0]:
            best = share, hypothesis.fault, hypothesis.sentence
        if share <= GOOD_ENOUGH:
            break
    place = f"request {note.request_id}, from position {suspect.first_wrong}"
    if best is None or best[0] > MAX_UNEXPLAINED:
        if max(row.difference.relative for row in rows if row.difference) <= LAST_BITS:
            return _rounding(rows)
        nearest = "" if best is None else f"; nearest is: {best[2]}, which leaves {best[0]:.0%} of it"
        return Finding(
            Fault.UNEXPLAINED, f"{place}: no known fault gives these logits{nearest}", "replay"
        )
    share, fault, sentence = best
    return Finding(fault, f"{place}: {sentence}", "replay", round(share, 4))


def _unexplained(observed: F32, right: F32, replayed: F32) -> float:
    """Distance of the replay from what was observed, as a share of the right replay's."""
    if not np.isfinite(replayed).all():
        return np.inf
    distance = float(np.sqrt(np.mean((observed - right).astype(np.float64) ** 2)))
    left = float(np.sqrt(np.mean((observed - replayed).astype(np.float64) ** 2)))
    return left / distance if distance else np.inf


def _evidence(lab: Lab, session: Session, seq_id: int) -> Evidence:
    """Wrong rows of a sequence and a few right ones, which a replay must not spoil."""
    rows = {row.position: row for row in session.watch.rows if row.seq_id == seq_id}
    positions: list[int] = []
    observed = []
    num_wrong = 0
    for position in sorted(rows):
        row = rows[position]
        known = lab.uncached.find(row.node)
        if known is None or num_wrong >= MAX_ROWS:
            continue
        num_wrong += row.logits is not None
        positions.append(position)
        observed.append(known.logits if row.logits is None else row.logits)
    right = lab.dense.logits(Replay(session.watch.notes[seq_id].tokens), positions)
    return Evidence(positions, np.stack(observed), right)


def _was_resumed(note: SequenceNote) -> bool:
    end = 0
    for start, length in note.chunks:
        if start < end:
            return True
        end = start + length
    return False


def _suspect(lab: Lab, session: Session, note: SequenceNote, first_wrong: int) -> Suspect:
    others: dict[tuple[int, ...], Other] = {}
    for other in session.watch.notes.values():
        if other.seq_id == note.seq_id or not other.tokens:
            continue
        is_sibling = other.request_id == note.request_id
        name = f"sample {other.sample_index}" if is_sibling else f"request {other.request_id}"
        others.setdefault(other.tokens, Other(name, other.tokens, is_sibling))
    group = lab.llm.model.kv_plan.groups[0]
    return Suspect(
        tokens=note.tokens,
        num_prompt_tokens=note.num_prompt_tokens,
        chunks=tuple(note.chunks),
        first_wrong=first_wrong,
        block_size=session.llm.settings.block_size if group.is_state else group.block_size,
        others=tuple(others.values()),
        was_resumed=_was_resumed(note),
    )
