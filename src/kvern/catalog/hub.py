"""Models named by a hub id, through huggingface_hub (extra ``hub``)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvern.errors import FetchError, ModelError

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<file>[\w./-]+\.gguf))?")
_FOLDER_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def is_hub_id(model: str) -> bool:
    """Whether `model` reads as ``org/name`` or ``org/name:FILE.gguf``."""
    match = _HUB_ID.fullmatch(model)
    return match is not None and not match["repo"].endswith((".gguf", ".json", ".safetensors"))


def hub_path(model: str, *, allow_fetch: bool) -> Path:
    """The local copy of a hub model: the folder, or the one GGUF file that was asked for.

    Raises:
        FetchError: huggingface_hub is not installed, or the hub cannot be reached.
        ModelError: the hub has no such model, or it is not here and `allow_fetch` is false.
    """
    match = _HUB_ID.fullmatch(model)
    if match is None:
        raise ModelError(f"{model!r} is not a hub id: write org/name or org/name:FILE.gguf")
    hub = _import_hub()
    local = _download(hub, match["repo"], match["file"], local_only=True)
    if local is not None:
        return local
    if not allow_fetch:
        raise ModelError(f"{model} is not on this machine yet: run `kvern pull {model}` first")
    fetched = _download(hub, match["repo"], match["file"], local_only=False)
    if fetched is None:
        raise FetchError(f"the hub gave no files for {model}: check the name and your connection")
    return fetched


def _import_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise FetchError(
            "a hub id needs huggingface_hub: run `pip install 'kvern[hub]'`, or give a local path"
        ) from error
    return huggingface_hub


def _download(hub: Any, repo: str, file: str | None, *, local_only: bool) -> Path | None:
    """Downloads or finds the files; None when a look at the local copy alone finds nothing."""
    errors = hub.errors
    try:
        if file is not None:
            return Path(hub.hf_hub_download(repo, file, local_files_only=local_only))
        return Path(
            hub.snapshot_download(
                repo, allow_patterns=list(_FOLDER_FILES), local_files_only=local_only
            )
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repo} asks you to accept its licence first: do so in a browser, then `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        if local_only:
            return None
        raise ModelError(f"the hub has no {repo}{':' + file if file else ''}") from error
    except Exception as error:  # the hub's client lets many kinds of transport error through
        if local_only:
            return None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(
            f"cannot fetch {repo} from the hub ({reason}): connect, or give a local path"
        ) from error
