"""The families that have a decoder. Adding one: a module here, and a line in `FAMILIES`."""

from __future__ import annotations

from kvern.errors import UnsupportedModelError
from kvern.models.config import Config, Family
from kvern.models.families.llama import LLAMA

FAMILIES: tuple[Family, ...] = (LLAMA,)


def family_of(config: Config, gguf_architecture: str | None = None) -> Family:
    """The family that decodes a configuration.

    Args:
        config: in config.json form.
        gguf_architecture: ``general.architecture`` when the weights are a GGUF file.

    Raises:
        UnsupportedModelError: names the architecture and the known ones.
    """
    if gguf_architecture is not None:
        wanted = [gguf_architecture]
        known = {name: family for family in FAMILIES for name in family.gguf_architectures}
    else:
        wanted = list(config.get("architectures") or [])
        known = {name: family for family in FAMILIES for name in family.architectures}
    for name in wanted:
        if name in known:
            return known[name]
    named = " / ".join(map(str, wanted)) or "not named in the configuration"
    raise UnsupportedModelError(
        f"architecture {named} has no decoder here; kvern runs {', '.join(sorted(known))}"
    )
