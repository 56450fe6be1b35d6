"""llama.cpp's rules as data: dates and build numbers at which its cache changed.

Sources: ggml-org/llama.cpp pull requests #11446 and #12801 (MLA), #13194 (window caches), #14363
(one stream per sequence), #19057 (no value copy of the latent), and published start-up logs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvern.plan.versions import EngineVersion, Since, rule_at

PAD = 256
"""Cells of a stream are rounded up to this."""

DEFAULT_UBATCH = 512
DEFAULT_CONTEXT = 4096

MLA_STORAGE = (
    (Since(), "heads"),
    (Since(date=(2025, 4), build=5140), "latent+values"),
    (Since(date=(2026, 1), build=7800), "latent"),
)
"""A converted MLA model: full heads; the latent as key and once more as value; the latent once."""

MLA_STORAGE_OF_EARLY_PULL_REQUESTS = "latent"
"""Pull request builds before MLA was merged kept the latent and the rotary key only (#11446)."""

MLA_STORAGE_OF_IK_FORK = "latent"

EXPANDED_LATENT_FAMILIES = ("minicpm3",)
"""Families whose latent is expanded to full heads in every version: their graph has no other."""

WINDOW_CACHE = (
    (Since(), False),
    (Since(date=(2025, 5), build=5443), True),
)

IGNORED_WINDOW_FAMILIES = (
    "mistral",
    "mixtral",
    "phi3",
    "phi3_v",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "starcoder2",
)
"""Families whose window is not read from the file, or read and switched off (phi3, #13676): their
graphs attend to, and store, every token."""

STREAMS = (
    (Since(), False),
    (Since(date=(2025, 7), build=5913), True),
)
"""Whether each sequence may have a stream of its own; before, one cache served all."""

INDEX_VALUES = (
    (Since(), True),
    (Since(date=(2026, 9), build=10600), False),
)
"""Whether index keys beside recurrent states had values allocated that nothing read (#28330)."""

BLOCK_BYTES = {
    "fp32": (1, 4),
    "fp16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""Format -> (elements, bytes) of one quantisation block."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one version."""

    mla_storage: str
    window_cache: bool
    has_streams: bool
    index_values: bool


def rules_of(version: EngineVersion, is_ik_fork: bool) -> Rules:
    """The rules that hold in `version`, of llama.cpp or of the ik_llama.cpp fork."""
    mla = rule_at(MLA_STORAGE, version)
    if is_ik_fork:
        mla = MLA_STORAGE_OF_IK_FORK
    elif version.is_pull_request and mla == "heads":
        mla = MLA_STORAGE_OF_EARLY_PULL_REQUESTS
    return Rules(
        mla_storage=mla,
        window_cache=not is_ik_fork and rule_at(WINDOW_CACHE, version),
        has_streams=not is_ik_fork and rule_at(STREAMS, version),
        index_values=rule_at(INDEX_VALUES, version),
    )
