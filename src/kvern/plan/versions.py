"""Engine versions as people write them, and rule tables that say which rule holds when.

Log files name versions loosely: "v0.11", "0.5.1x", "v0.19-0.20", "b6xxx", "2026-09", "fork of
v0.2x", "v0.15.2rc1", "0.5.4 (PR)". A version is read as a tuple of numbers; an x stands for the
highest digit (0.2x = 0.29, 0.5.x = 0.5.99), a range for its first end. "(PR)" marks a build of
a change that was not released yet: `is_pull_request`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

_DOTTED = re.compile(r"(?<![\w.])v?(\d[\dx]*(?:\.[\dx]+)+)", re.IGNORECASE)
_BUILD = re.compile(r"(?<![\w])b(\d[\dx]*)", re.IGNORECASE)
_DATE = re.compile(r"(?<!\d)(20\d\d)(?:-(\d[\dx]?))?(?:-(\d\d))?(?!\d)")

Numbers = tuple[int, ...]
RuleT = TypeVar("RuleT")


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """A version that can be compared with the rows of a rule table.

    Attributes:
        text: what was written, or "latest".
        release: dotted release numbers, empty if the text has none.
        date: (year, month) or (year,), empty if the text has none.
        build: llama.cpp build number, if the text has one.
        is_pull_request: the text says that it is the build of a pull request.
        is_latest: nothing was asked for: the newest rules hold.
    """

    text: str
    release: Numbers = ()
    date: Numbers = ()
    build: int | None = None
    is_pull_request: bool = False
    is_latest: bool = False


LATEST = EngineVersion("latest", is_latest=True)


def parse_version(text: str | None) -> EngineVersion:
    """Reads a version; nothing, "latest" and "main" mean the newest rules.

    Text without any number (a branch name) also means the newest rules.
    """
    cleaned = (text or "").strip()
    if cleaned.lower() in ("", "latest", "main", "master", "nightly"):
        return LATEST
    dated = _DATE.search(cleaned)
    dotted = None if dated and dated.start() == 0 else _DOTTED.search(cleaned)
    release = tuple(map(_highest, dotted[1].lower().split("."))) if dotted else ()
    build = None if dotted else _BUILD.search(cleaned)
    date: Numbers = ()
    if dated and not dotted:
        date = tuple(_month(part) if i else int(part) for i, part in enumerate(dated.groups()[:2])
                     if part is not None)  # fmt: skip
    return EngineVersion(
        text=cleaned,
        release=release,
        date=date,
        build=_highest(build[1].lower()) if build else None,
        is_pull_request="(pr)" in cleaned.lower(),
        is_latest=not (release or build or date),
    )


def _highest(digits: str) -> int:
    if digits == "x":
        return 99
    return int(digits.replace("x", "9"))


def _month(digits: str) -> int:
    return min(_highest(digits), 12)


@dataclass(frozen=True, slots=True)
class Since:
    """When a rule came into force. A row without numbers holds from the beginning."""

    release: Numbers = ()
    date: Numbers = ()
    build: int | None = None

    def reached_by(self, version: EngineVersion) -> bool:
        """Whether `version` is this row's start or later."""
        if version.is_latest or not (self.release or self.date or self.build):
            return True
        if version.build is not None and self.build is not None:
            return version.build >= self.build
        if version.date and self.date:
            # a bare year means its end; a bare month includes what came in that month
            asked = version.date if len(version.date) > 1 else (*version.date, 12)
            return asked[:2] >= self.date[:2]
        if version.release and self.release:
            return version.release >= self.release
        return True


def rule_at(table: tuple[tuple[Since, RuleT], ...], version: EngineVersion) -> RuleT:
    """The last row of `table` (oldest first) that `version` has reached."""
    current = table[0][1]
    for since, rule in table:
        if since.reached_by(version):
            current = rule
    return current
