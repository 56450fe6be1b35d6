"""Every command on the planner's pages runs and prints what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvern.cli.main import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("numbers.md", "planner.md")


def sessions(page: str) -> list[tuple[str, list[str]]]:
    """Commands of a page in order, each with the lines that it must print."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.strip() and line.strip() != "...":
                found[-1][1].append(line)
    return found


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_the_page_says(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = sessions(page)
    assert commands
    for command, lines in commands:
        words = shlex.split(command)
        if words[0] == "echo":
            text, arrow, name = words[1:]
            assert arrow == ">"
            (tmp_path / name).write_text(text)
            continue
        assert words[:2] == ["kvern", "plan"], command
        code = main(words[1:])
        captured = capsys.readouterr()
        printed = squeezed(captured.out + captured.err)
        for line in lines:
            assert squeezed(line) in printed, f"{command}\nprints no line: {line}"
        assert code == (1 if "error:" in printed else 0), command
