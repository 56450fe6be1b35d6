"""Models that have no cache to describe, and why: refused with the reason instead of "unknown"."""

from __future__ import annotations

from collections.abc import Mapping

from kvern.errors import UnsupportedModelError
from kvern.spec.configs.reader import Config

_ENCODER = (
    "{family} is an encoder: every token attends in both directions, so a new token changes old "
    "positions and nothing can be cached"
)
_ENCODER_DECODER = (
    "{family} is an encoder-decoder: its decoder reads an encoded input beside its own tokens, "
    "which this cache does not hold"
)
_PREFIX = (
    "{family} attends to its prefix in both directions: a new token of the prefix changes old "
    "positions, so nothing of it can be cached"
)
_DIFFUSION = (
    "{family} fills in tokens in any order and attends in both directions, so computed positions "
    "change and nothing can be cached"
)

_REASONS = {
    _ENCODER: (
        "albert bert bert-generation big_bird camembert canine clip_text_model convbert "
        "data2vec-text deberta deberta-v2 distilbert electra embedding_gemma2 ernie esm "
        "eurobert flaubert fnet funnel ibert layoutlm layoutlmv3 longformer luke megatron-bert "
        "mobilebert modernbert mpnet mra nomic_bert nystromformer rembert roberta "
        "roberta-prelayernorm roc_bert roformer squeezebert vit xlm xlm-roberta xlm-roberta-xl "
        "xmod yoso clip siglip siglip2 dinov2 esmc gte jina_embeddings_v3 neomme perceiver tapas "
        "ultrabert ultravbert splinter lilt markuplm layoutlmv2 layoutxlm bros dpr lxmert visual_bert "
        "vilt flava"
    ),
    _ENCODER_DECODER: (
        "bart bigbird_pegasus blenderbot blenderbot-small bridgetower encoder-decoder fsmt "
        "led longt5 m2m_100 marian mbart moonshine mt5 mvp nllb-moe pegasus pegasus_x "
        "plbart prophetnet pop2piano seamless_m4t seamless_m4t_v2 speech_to_text speecht5 "
        "switch_transformers t5 t5gemma t5gemma2 trocr udop umt5 vision-encoder-decoder "
        "whisper"
    ),
    _PREFIX: "paligemma git glm-130b unilm xlnet",
    _DIFFUSION: "diffusion_gemma dream llada llada2_moe sdar",
}
_REASON_OF = {family: reason for reason, names in _REASONS.items() for family in names.split()}


def refuse_uncacheable(config: Config, family: str) -> None:
    """Refuse a family, or a configuration, whose computed positions do not stay as they are.

    Raises:
        UnsupportedModelError: says why nothing can be cached.
    """
    reason = _REASON_OF.get(family.lower())
    if reason is None and config.get("is_encoder_decoder") is True:
        reason = _ENCODER_DECODER
    if reason is None and _is_bidirectional(config):
        reason = _ENCODER
    if reason is None and _has_prefix(config):
        reason = _PREFIX
    if reason is not None:
        raise UnsupportedModelError(f"{config.source}: {reason.format(family=family)}")


def _has_prefix(config: Config) -> bool:
    """A prefix mask, which MPT states in its table of attention settings."""
    inner = config.get("attn_config")
    tables = [config.values, inner if isinstance(inner, Mapping) else {}]
    return any(table.get(name) for table in tables for name in ("prefix_lm", "use_prefix_lm"))


def _is_bidirectional(config: Config) -> bool:
    """Image tokens that see each other are no reason: text stays causal ("vision")."""
    if config.get("is_causal") is False or config.get("causal") is False:
        return True
    return config.get("use_bidirectional_attention") in (True, "all")
