"""The real size of a model's weights, from file headers alone."""

from __future__ import annotations

from pathlib import Path

from kvern.spec.gguf import is_gguf, read_header
from kvern.spec.safetensors import INDEX_NAME, SINGLE_NAME, read_folder


def file_weights(path: Path) -> tuple[int, str] | None:
    """Bytes of all tensors in a GGUF file or a folder of safetensors.

    Returns:
        The bytes and their basis, or None where there are no weights (a bare config.json).
    """
    if path.is_file() and is_gguf(path):
        tensors = read_header(path).tensors
        return sum(t.nbytes for t in tensors.values()), f"{len(tensors):,} tensors of {path.name}"
    if path.is_dir() and any((path / name).is_file() for name in (INDEX_NAME, SINGLE_NAME)):
        shards = read_folder(path).files
        sizes = [tensor.nbytes for shard in shards for tensor in shard.tensors.values()]
        return sum(sizes), f"{len(sizes):,} tensors in {len(shards):,} safetensors files"
    return None
