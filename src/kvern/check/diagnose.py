"""From wrong logits to a name: which known fault gives exactly these?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.check.compare import F32, spread
from kvern.check.dense import Replay
from kvern.check.hypotheses import Hypothesis, Other, Suspect, hypotheses
from kvern.check.lab import Lab
from kvern.check.names import Fault, Finding
from kvern.check.session import Session
from kvern.check.watch import Row, SequenceNote

Rerun = Callable[[bool], Session | None]

MAX_ROWS, MAX_RIGHT_ROWS = 8, 8
"""Wrong and right rows of a sequence that a replay is compared on; the first wrong ones are the plainest."""

MAX_UNEXPLAINED = 0.15
"""A replay names a fault when it leaves at most this share of what a right replay leaves."""

MAX_UNEXPLAINED_ALONE, CLEAR_LEAD = 0.55, 1.6
"""Or at most the first, when every other fault's replays leave so many times as much: rounding adds noise."""

MAX_UNEXPLAINED_IF_NAMED = 0.75
"""Of the best replay, when another case has named its fault already."""

MAX_SPOILT = 0.3
"""A replay may change right rows by at most this share of the difference, and noise."""

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
    is_wrong: npt.NDArray[np.bool_]
    noise_rms: float

    @property
    def distance(self) -> float:
        """Of the wrong rows from the right replay."""
        return _rms(self.observed[self.is_wrong], self.right[self.is_wrong])


def wrong_rows(lab: Lab, session: Session) -> list[Row]:
    """Rows outside the tolerance, in the order of computing."""
    return [
        row
        for row in session.watch.rows
        if row.difference is not None and not row.difference.is_within(lab.tolerance)
    ]


def diagnose(lab: Lab, session: Session, rerun: Rerun) -> list[Finding]:
    """Name what made rows of a session wrong.

    Args:
        lab: for replays.
        session: a closed session with wrong rows.
        rerun: carries the case out once more, with traced layers or as before, and gives the session in
            the same place, or None.
    """
    rows = wrong_rows(lab, session)
    if not rows:
        return []
    if lab.is_random:
        return [
            Finding(
                Fault.RANDOMNESS, "the same input gives different logits each time", "comparison"
            )
        ]
    again = rerun(lab.options.trace_layers)
    differing = None if again is None else _first_unequal(lab, rows, wrong_rows(lab, again))
    if differing is not None:
        sentence = f"carried out twice, the case gives different logits at {_place(differing)}"
        return [Finding(Fault.RANDOMNESS, sentence, "comparison")]
    finite = [row for row in rows if row.logits is not None and np.isfinite(row.logits).all()]
    if not finite:
        return [_not_finite(lab, session, rows[0])]
    found = _replayed(lab, session, finite)
    if found.fault in (Fault.UNEXPLAINED, Fault.ROUNDING) and not lab.options.trace_layers:
        traced = rerun(True)
        if traced is not None and not wrong_rows(lab, traced):
            return [_recorded(finite[0])]
    return [found]


def _recorded(row: Row) -> Finding:
    return Finding(
        Fault.RECORDING,
        f"logits differ from {_place(row)} on, and are right when the case runs operation by operation (with "
        "traced layers): repeating a recorded step goes wrong",
        "comparison",
    )


def _place(row: Row) -> str:
    return f"position {row.position} of request {row.request_id}"


def _first_unequal(lab: Lab, rows: Sequence[Row], again: Sequence[Row]) -> Row | None:
    """A wrong row that came out differently the second time."""
    others = {(row.seq_id, row.position, row.step): row for row in again}
    for row in rows:
        other = others.get((row.seq_id, row.position, row.step))
        if other is None or other.logits is None or row.logits is None:
            return row
        if not np.array_equal(row.logits, other.logits, equal_nan=True):
            distance = np.nanmax(np.abs(row.logits - other.logits)) / spread(row.logits)
            if not distance <= lab.tolerance:
                return row
    return None


def _not_finite(lab: Lab, session: Session, row: Row) -> Finding:
    known = lab.uncached.find(row.node)
    is_right_finite = known is not None and (
        known.logits is None or bool(np.isfinite(known.logits).all())
    )
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
    evidence = _evidence(lab, session, rows)
    suspect = _suspect(
        lab, session, note, min(row.position for row in rows if row.seq_id == seq_id)
    )
    best: dict[Fault, tuple[float, Hypothesis]] = {}
    for hypothesis in hypotheses(suspect):
        left = _try(lab, hypothesis, evidence)
        if left < best.get(hypothesis.fault, (np.inf, hypothesis))[0]:
            best[hypothesis.fault] = left, hypothesis
        if left <= GOOD_ENOUGH:
            break
    ranking = sorted(best.values(), key=lambda entry: entry[0])
    place = f"request {note.request_id}, from position {suspect.first_wrong}"
    if ranking and _is_convincing(
        [left for left, _ in ranking], is_named=ranking[0][1].fault in lab.named
    ):
        share, found = ranking[0]
        lab.named.add(found.fault)
        return Finding(found.fault, f"{place}: {found.sentence}", "replay", round(share, 4))
    largest = max(row.difference.relative for row in rows if row.difference)
    if largest <= max(LAST_BITS, 2 * lab.noise):
        return _rounding(rows)
    nearest = ""
    if ranking:
        nearest = f"; nearest is: {ranking[0][1].sentence}, which leaves {ranking[0][0]:.0%} of it"
    return Finding(
        Fault.UNEXPLAINED, f"{place}: no known fault gives these logits{nearest}", "replay"
    )


def _try(lab: Lab, hypothesis: Hypothesis, evidence: Evidence) -> float:
    """Share of the difference that a hypothesis leaves; infinite where it says nothing."""
    indices = [position + hypothesis.shift for position in evidence.positions]
    usable = [
        i
        for i, index in enumerate(indices)
        if 0 <= index < len(hypothesis.replay.tokens)
        and hypothesis.only in (None, evidence.positions[i])
    ]
    if not usable:
        return np.inf
    logits = lab.dense.logits(hypothesis.replay, [indices[i] for i in usable])
    observed, is_wrong = evidence.observed[usable], evidence.is_wrong[usable]
    if not np.isfinite(logits).all() or not is_wrong.any():
        return np.inf
    spoilt = _rms(observed[~is_wrong], logits[~is_wrong])
    if spoilt > MAX_SPOILT * evidence.distance + 2 * evidence.noise_rms:
        return np.inf
    return _rms(observed[is_wrong], logits[is_wrong]) / evidence.distance


def _is_convincing(shares: Sequence[float], *, is_named: bool) -> bool:
    """Whether the best replay names the fault: it is near, or much nearer than those of all other faults.

    Args:
        shares: what the best replay of each fault leaves unexplained, best first.
        is_named: another case has named the best one's fault already.
    """
    if shares[0] <= (MAX_UNEXPLAINED_IF_NAMED if is_named else MAX_UNEXPLAINED):
        return True
    next_best = shares[1] if len(shares) > 1 else 1.0
    return shares[0] <= MAX_UNEXPLAINED_ALONE and shares[0] * CLEAR_LEAD <= min(next_best, 1.0)


def _rms(a: F32, b: F32) -> float:
    return float(np.sqrt(np.mean((a - b).astype(np.float64) ** 2))) if len(a) else 0.0


def _evidence(lab: Lab, session: Session, rows: Sequence[Row]) -> Evidence:
    """The first wrong rows of a sequence, and a few right ones, which a replay must not spoil."""
    seq_id = rows[0].seq_id
    wrong = {
        row.position: row.logits for row in rows if row.seq_id == seq_id and row.logits is not None
    }
    chosen = dict(sorted(wrong.items())[:MAX_ROWS])
    for row in session.watch.rows:
        known = lab.uncached.find(row.node)
        if row.seq_id != seq_id or row.position in wrong or known is None:
            continue
        if len(chosen) < MAX_ROWS + MAX_RIGHT_ROWS and known.logits is not None:
            chosen[row.position] = known.logits
    positions = sorted(chosen)
    right = lab.dense.logits(Replay(session.watch.notes[seq_id].tokens), positions)
    observed = np.stack([chosen[position] for position in positions])
    is_wrong = np.array([position in wrong for position in positions])
    return Evidence(positions, observed, right, is_wrong, lab.noise_rms)


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
