"""A path that the user gave: whether it is there, and what its first bytes say it is."""

from __future__ import annotations

from pathlib import Path

from kvern.errors import FileFormatError, ModelError

_GGUF_MAGIC = b"GGUF"


def path_of(text: str) -> Path | None:
    """The path that `text` names, or None when there is nothing of that name.

    Raises:
        ModelError: the system does not let anybody look, or the home folder is nobody's.
    """
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except RuntimeError as error:  # ~name of a user that does not exist
        raise ModelError(f"there is no home folder for {text}: give a whole path") from error
    except OSError as error:
        raise _unreadable(text, error) from error


def check_file(path: Path) -> None:
    """Refuses a file that cannot be a model, whatever is wanted of it; folders and pipes pass.

    Raises:
        ModelError: it cannot be read, or weights without a configuration were named.
        FileFormatError: it is empty, or it is called .gguf and is something else.
    """
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            start = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise _unreadable(str(path), error) from error
    if not start:
        raise FileFormatError(f"{path} is empty: fetch it again")
    if path.suffix.lower() == ".gguf" and start != _GGUF_MAGIC:
        raise FileFormatError(
            f"{path} is not a GGUF file: it starts with {start!r} instead of {_GGUF_MAGIC!r}"
        )
    if path.suffix.lower() == ".safetensors":
        raise ModelError(
            f"{path} holds weights without a configuration: give its folder, with the config.json"
        )


def check_weights(path: Path) -> None:
    """Refuses a configuration where a model is about to run.

    Raises:
        ModelError: there are no weights in it.
    """
    if path.suffix.lower() == ".json" and path.is_file():
        raise ModelError(
            f"{path} is only a configuration, which `kvern inspect` and `kvern plan` accept: "
            "running needs weights, so give a GGUF file or the folder of the model"
        )


def _unreadable(text: str, error: OSError) -> ModelError:
    return ModelError(f"{text} cannot be read: {error.strerror or error}")
