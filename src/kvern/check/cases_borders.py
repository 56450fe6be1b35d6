"""Cases about borders: where a window, a chunk or a position regime of the model ends.

The other cases' sequences are short, so that a model with a window of 512 tokens would never leave it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvern.check.lab import Lab
from kvern.check.sheet import Case, Sheet
from kvern.spec.reach import Chunk, Window

MAX_BORDER = 1100
"""Borders further out are not tried: a case takes sequences of twice its border, several times over."""

MAX_QUICK_BORDER = 64
NUM_DECODED = 5


def border_cases(lab: Lab) -> Iterator[Case]:
    """One case per border that the context reaches twice."""
    limit = MAX_QUICK_BORDER if lab.options.is_quick else MAX_BORDER
    for border in _borders(lab):
        length = 2 * border + 3
        if 1 < border <= limit and lab.fitting(length) == length:
            title = f"lengths around the border at {border} and past twice of it"
            yield Case(f"border-{border}", title, partial(_border, border))


def _borders(lab: Lab) -> list[int]:
    """Sizes of windows and chunks, and where a second set of rotary factors begins."""
    reaches = [group.spec.reach for group in lab.llm.model.kv_plan.groups]
    found = {reach.size for reach in reaches if isinstance(reach, Window | Chunk)}
    regimes = lab.llm.model.decoder.config.regimes
    if regimes is not None:
        found.add(regimes.border)
    return sorted(found)


def _border(border: int, sheet: Sheet) -> None:
    """One shorter, equal, one longer, twice as long and three; in company, over the border, behind a hit."""
    main = sheet.lab.tokens(2 * border + 3, 60)
    sheet.prepare(main)
    lengths = [border - 1, border, border + 1, len(main)]
    session = sheet.session(
        sum(lengths) + 16 * len(lengths),
        enable_prefix_caching=False,
        max_chunk_tokens=max(border // 3, 1),
    )
    for length in lengths:
        session.submit(f"cold-{length}", main[:length], 1)
    session.finish()
    session = sheet.session(2 * len(main) + 64)
    session.submit("over", main[: max(border - 2, 1)], NUM_DECODED)
    session.finish()
    session.submit("head", main[: border + 1], 1)
    session.finish()
    session.submit("rest", main, NUM_DECODED)
    session.finish()
    sheet.note(f"'rest' hit {session.cached_tokens('rest')} of {len(main)} tokens")
