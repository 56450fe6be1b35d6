"""Engine modules hold rules, not cases: model names may occur in their data tables alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvern.plan.engines

FOLDER = Path(kvern.plan.engines.__file__).parent
NAMES = re.compile(
    r"qwen|llama-?\d|gemma|deepseek|glm|kimi|mistral|minimax|gpt-?oss|granite|nemotron|jamba|opt-",
    re.IGNORECASE,
)


def code_strings(tree: ast.Module) -> Iterator[str]:
    """String constants that are no docstrings."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node.value  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_no_branch_names_a_model(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.name.endswith("_rules.py"):
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        trees = [ast.Module(body=[node], type_ignores=[]) for node in functions]
    else:
        trees = [tree]
    for part in trees:
        named = [text for text in code_strings(part) if NAMES.search(text)]
        assert named == []
