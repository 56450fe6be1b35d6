"""The families that have a decoder. Adding one: a module here, and a line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping

from kvern.errors import UnsupportedModelError
from kvern.models.config import Config, Family
from kvern.models.families.cohere import COHERE
from kvern.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, MINICPM3
from kvern.models.families.falcon import FALCON
from kvern.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from kvern.models.families.gemma3n import GEMMA3N
from kvern.models.families.gemma4 import GEMMA4
from kvern.models.families.glm import GLM4_MOE
from kvern.models.families.gpt import GPT2, GPT_NEOX, GPTJ
from kvern.models.families.gpt_oss import GPT_OSS
from kvern.models.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE
from kvern.models.families.lfm import LFM2
from kvern.models.families.llama import LLAMA, MINISTRAL3
from kvern.models.families.llama4 import LLAMA4
from kvern.models.families.minimax import MINIMAX_M2
from kvern.models.families.mixtral import MIXTRAL
from kvern.models.families.nemotron import NEMOTRON_H
from kvern.models.families.olmo import OLMO2, OLMOE
from kvern.models.families.opt import OPT
from kvern.models.families.phi import PHI3
from kvern.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from kvern.models.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from kvern.models.families.smollm import SMOLLM3
from kvern.models.families.starcoder import STARCODER2
from kvern.spec.configs.reader import Config as FieldReader
from kvern.spec.configs.refusals import refuse_uncacheable

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MINISTRAL3,
    MIXTRAL,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    PHI3,
    OLMO2,
    OLMOE,
    SMOLLM3,
    GRANITE,
    GRANITE_MOE,
    GRANITE_HYBRID,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    NEMOTRON_H,
    LFM2,
    GPT2,
    GPT_NEOX,
    FALCON,
    LLAMA4,
    GPT_OSS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    MINICPM3,
    GLM4_MOE,
    MINIMAX_M2,
    COHERE,
    STARCODER2,
    OPT,
    GPTJ,
)


def family_of(config: Config, gguf_architecture: str | None = None) -> Family:
    """The family that decodes a configuration.

    Args:
        config: in config.json form.
        gguf_architecture: ``general.architecture`` when the weights are a GGUF file.

    Raises:
        UnsupportedModelError: names the architecture and the known ones, or says why nothing of it
            can be cached, or names a quantised form of a folder's weights that kvern does not read.
    """
    if gguf_architecture is not None:
        wanted = [gguf_architecture]
        known = {name: family for family in FAMILIES for name in family.gguf_architectures}
    else:
        wanted = list(config.get("architectures") or [])
        known = {name: family for family in FAMILIES for name in family.architectures}
        _refuse_quantized(config)
    for name in wanted:
        if name in known:
            family = known[name]
            return family if family.variant is None else family.variant(config, family)
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            refuse_uncacheable(FieldReader(part, "the model"), str(part.get("model_type") or ""))
    named = " / ".join(map(str, wanted)) or "not named in the configuration"
    raise UnsupportedModelError(
        f"architecture {named} has no decoder here; kvern runs {', '.join(sorted(known))}"
    )


def _refuse_quantized(config: Config) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "of an unnamed kind")
        raise UnsupportedModelError(
            f"the folder's weights are quantised ({method}), which kvern does not read: "
            "use the unquantised folder, or a GGUF file"
        )
