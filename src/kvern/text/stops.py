"""Stop strings, found across the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvern.errors import InputError


class StopStrings:
    """Watches a text that arrives in pieces for the first of some strings.

    Text that could still become a stop string is held back. The result does not depend on how the
    text is cut into pieces: the string that is complete first ends the text, of those that are
    complete at the same character the longest; the text is cut right before it.

    Args:
        stops: the strings; none is allowed.

    Raises:
        InputError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise InputError("a stop string is empty: every text contains it; leave it out")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest_prefix = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matched

    def push(self, delta: str) -> tuple[str, str | None]:
        """Takes the next piece of text.

        Returns:
            The text that is safe to show now, and the stop string that ended it or None. After
            that nothing more is shown.
        """
        if self._matched is not None:
            return "", self._matched
        text = self._held + delta
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            start, self._matched = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._held = ""
            return text[:start], self._matched
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """The text held back, once no more can come."""
        rest, self._held = self._held, ""
        return rest

    def _num_held(self, text: str) -> int:
        for length in range(min(self._longest_prefix, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
