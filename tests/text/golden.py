"""Token ids that llama.cpp gives, kept in `data/llama_cpp.json`, and how they were made.

The small byte-level vocabulary was trained without word borders, so that its merges cross every
border a pre-tokenizer can draw. To make the file anew (after a change of `texts.py`), with the
environment that `llama_cpp_oracle.py` describes:

    python -m tests.text.golden ORACLE_PYTHON "NAME OF THE ORACLE" SMOLLM2.gguf GEMMA3.gguf
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.text.texts import LONG_TEXTS, TEXTS

from kvern.text.pretokenizers import PRE_TOKENIZERS

GOLDEN_FILE = Path(__file__).parent / "data" / "llama_cpp.json"
ORACLE_SCRIPT = Path(__file__).parent / "llama_cpp_oracle.py"


@cache
def golden() -> dict[str, Any]:
    """The golden file, checked against the texts it was made from."""
    data: dict[str, Any] = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))
    assert data["texts"] == digest(list(TEXTS)), "texts.py has changed: make the golden file anew"
    return data


def digest(value: Any) -> str:
    """A short fingerprint of anything JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def byte_level_metadata(kind: str) -> dict[str, Any]:
    """GGUF metadata of the small byte-level vocabulary with the named pre-tokenizer."""
    vocabulary = golden()["byte_level"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": vocabulary["tokens"],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(vocabulary["tokens"]) - 3),
        "tokenizer.ggml.merges": vocabulary["merges"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> None:
    """Writes a GGUF file without tensors."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _ask(oracle: str, model: Path, texts: Sequence[str], folder: Path) -> dict[str, Any]:
    file = folder / "texts.json"
    file.write_text(json.dumps(list(texts)), encoding="utf-8")
    command = [oracle, str(ORACLE_SCRIPT), str(model), str(file)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def _model_entry(oracle: str, model: Path, folder: Path) -> dict[str, Any]:
    entry = _ask(oracle, model, TEXTS, folder)
    entry["long"] = [
        [len(ids), digest(ids)]
        for ids in _ask(oracle, model, list(LONG_TEXTS.values()), folder)["plain"]
    ]
    return entry


def _kinds_entry(oracle: str, vocabulary: dict[str, Any], folder: Path) -> dict[str, Any]:
    distinct: list[list[list[int]]] = [[] for _ in TEXTS]
    kinds: dict[str, list[int]] = {}
    adding_bos = []
    for kind in sorted(name for name, rule in PRE_TOKENIZERS.items() if rule.byte_level):
        model = folder / "vocabulary.gguf"
        write_vocabulary(model, {**byte_level_metadata(kind)})
        answer = _ask(oracle, model, TEXTS, folder)
        if answer["rules"]["add_bos"]:
            adding_bos.append(kind)
        kinds[kind] = []
        for known, ids in zip(distinct, answer["plain"], strict=True):
            if ids not in known:
                known.append(ids)
            kinds[kind].append(known.index(ids))
    return {**vocabulary, "ids": distinct, "kinds": kinds, "adding_bos": adding_bos}


def main(arguments: Sequence[str]) -> None:
    """Rewrites the golden file; its vocabulary stays."""
    oracle, name, smollm2, gemma3 = arguments
    old = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))
    old["texts"] = digest(list(TEXTS))
    GOLDEN_FILE.write_text(json.dumps(old), encoding="utf-8")
    vocabulary = {key: old["byte_level"][key] for key in ("tokens", "merges")}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = {
            "oracle": name,
            "texts": digest(list(TEXTS)),
            "byte_level": _kinds_entry(oracle, vocabulary, folder),
            "smollm2": _model_entry(oracle, Path(smollm2), folder),
            "gemma3-270m": _model_entry(oracle, Path(gemma3), folder),
        }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    GOLDEN_FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
