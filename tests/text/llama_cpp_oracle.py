"""Asks llama.cpp for token ids; run by hand where the golden files are made anew.

    python -m venv ORACLE && ORACLE/bin/pip install xllamacpp
    ORACLE/bin/python tests/text/llama_cpp_oracle.py FILE.gguf TEXTS.json > IDS.json

The prebuilt module exports llama.cpp's C interface. The file may hold a vocabulary only.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress_callback", ctypes.c_void_p),
        ("progress_callback_user_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool),
        ("load_mtp", ctypes.c_bool),
    )


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_ERROR_LEVEL = 4


@_LOG
def _log(level: int, text: bytes, _: Any) -> None:
    if level == _ERROR_LEVEL:
        sys.stderr.write(text.decode(errors="replace"))


def _library() -> ctypes.CDLL:
    import xllamacpp

    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    library.llama_model_default_params.restype = _ModelParams
    for name in ("llama_model_load_from_file", "llama_model_get_vocab"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("llama_vocab_is_eog", "llama_vocab_get_add_bos", "llama_vocab_get_add_eos"):
        getattr(library, name).restype = ctypes.c_bool
    library.llama_log_set(_log, None)
    library.llama_backend_init()
    return library


class LlamaCpp:
    """A vocabulary in llama.cpp's hands."""

    def __init__(self, path: str | Path) -> None:
        self._library = _library()
        params = self._library.llama_model_default_params()
        params.vocab_only = True
        model = self._library.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab = ctypes.c_void_p(
            self._library.llama_model_get_vocab(ctypes.c_void_p(model)),
        )

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text."""
        data = text.encode()
        room = len(data) + 16
        buffer = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(
            self._vocab,
            data,
            len(data),
            buffer,
            room,
            ctypes.c_bool(add_special),
            ctypes.c_bool(parse_special),
        )
        if count < 0:
            raise RuntimeError(f"llama_tokenize returned {count}")
        return list(buffer[:count])

    def rules(self) -> dict[str, Any]:
        """What the library adds to a text, and what ends a generation."""
        size = self._library.llama_vocab_n_tokens(self._vocab)
        return {
            "add_bos": self._library.llama_vocab_get_add_bos(self._vocab),
            "add_eos": self._library.llama_vocab_get_add_eos(self._vocab),
            "end_ids": [i for i in range(size) if self._library.llama_vocab_is_eog(self._vocab, i)],
        }


def main(arguments: Sequence[str]) -> None:
    """Prints plain and special-parsing ids of the texts as JSON."""
    model = LlamaCpp(arguments[0])
    texts = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    plain = [model.encode(text, add_special=False, parse_special=False) for text in texts]
    special = [model.encode(text, add_special=True, parse_special=True) for text in texts]
    json.dump({"rules": model.rules(), "plain": plain, "special": special}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
