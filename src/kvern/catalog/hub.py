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


def hub_path(model: str, *, allow_fetch: bool, look_here_first: bool = True) -> Path:
    """The local copy of a hub model: the folder, or the one GGUF file that was asked for.

    Args:
        model: the hub id.
        allow_fetch: whether the hub may be asked for what is not here.
        look_here_first: false asks the hub at once, which completes a copy that an interrupted
            fetch left behind.

    Raises:
        FetchError: huggingface_hub is not installed, or the hub cannot be reached.
        ModelError: the hub has no such model, or it is not here and `allow_fetch` is false.
    """
    match = _HUB_ID.fullmatch(model)
    if match is None:
        raise ModelError(f"{model!r} is not a hub id: write org/name or org/name:FILE.gguf")
    hub, errors = _import_hub()
    repo, file = match["repo"], match["file"]
    if look_here_first or not allow_fetch:
        folder = _download(hub, errors, repo, file, local_only=True)
        found = None if folder is None else _wanted(folder, file, for_running=allow_fetch)
        if found is not None:
            return found
    if not allow_fetch:
        raise ModelError(f"{model} is not on this machine yet: run `kvern pull {model}` first")
    folder = _download(hub, errors, repo, file, local_only=False)
    found = None if folder is None else _wanted(folder, file, for_running=False)
    if found is None and file is not None:
        raise ModelError(f"{repo} has no file {file}: check the spelling and your connection")
    if found is None:
        raise ModelError(
            f"{repo} has no config.json: if it holds GGUF files, name one of them as "
            f"{repo}:FILE.gguf"
        )
    return found


def _wanted(folder: Path, file: str | None, *, for_running: bool) -> Path | None:
    """What was asked for in a snapshot, which holds only what earlier fetches asked for."""
    if file is not None:
        return folder / file if (folder / file).is_file() else None
    is_enough = (folder / "config.json").is_file() and (
        not for_running or next(folder.glob("*.safetensors"), None) is not None
    )
    return folder if is_enough else None


def _import_hub() -> tuple[Any, Any]:
    """The package and its errors: a module of its own, which the package itself never exports."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise FetchError(
            "a hub id needs huggingface_hub: run `pip install 'kvern[hub]'`, or give a local path"
        ) from error
    return huggingface_hub, huggingface_hub.errors


def _download(
    hub: Any, errors: Any, repo: str, file: str | None, *, local_only: bool
) -> Path | None:
    """The folder of the snapshot; None when a look at the local copy alone finds nothing.

    A single file comes as a snapshot too: without a connection that fails at once, where the hub's
    function for one file tries for half a minute.
    """
    patterns = [file] if file is not None else list(_FOLDER_FILES)
    try:
        return Path(
            hub.snapshot_download(repo, allow_patterns=patterns, local_files_only=local_only)
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repo} asks you to accept its licence first: do so in a browser, then `hf auth login`"
        ) from error
    except errors.LocalEntryNotFoundError as error:  # a kind of EntryNotFoundError: it stands first
        if local_only:
            return None
        raise FetchError(
            f"cannot reach the hub for {repo}, and it is not on this machine yet: connect, or give "
            "a local path"
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{repo} is no hub id ({_first_line(error)}): write org/name") from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        if local_only:
            return None
        raise ModelError(
            f"the hub has no {repo}, or it is private: check the spelling, or `hf auth login`"
        ) from error
    except Exception as error:  # the hub's client lets many kinds of transport error through
        if local_only:
            return None
        raise FetchError(
            f"cannot fetch {repo} from the hub ({_first_line(error)}): connect, or give a local path"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
