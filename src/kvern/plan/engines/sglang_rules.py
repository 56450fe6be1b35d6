"""SGLang's rules as data: what changed in which version.

Sources: SGLang's `model_executor` and `mem_cache` modules across versions, sgl-project/sglang pull
requests #11309 and #18039, and start-up logs that people published.
"""

from __future__ import annotations

from fractions import Fraction

from kvern.plan.engines import base
from kvern.plan.versions import Since

FORMAT_BYTES = {**base.FORMAT_BYTES, "nvfp4": 0.5 + 1 / 16}
"""Bytes per element: fp4 keeps one byte of scale for 16 elements."""

WINDOW_RATIO = Fraction(4, 5)
STATE_RATIO = 0.9
"""Default share of state memory to KV memory where the number of slots is not given."""

CHUNKED_PREFILL_TOKENS = 8192
RUNTIME_RESERVE = 2**30
INDEX_SCALE_GROUP = 128

INDEX_IN_PRINT = (
    (Since(), False),
    (Since(release=(0, 5, 4)), True),
)
"""Whether the printed size counts the index keys of sparse attention; before, it left them out."""

HYBRID_WINDOW = (
    (Since(), ()),
    (
        Since(release=(0, 5)),
        ("Llama4", "GptOss", "MiMoV2", "Step3p5", "Gemma4"),
    ),
)
"""Architectures whose window layers get a smaller pool; other models keep windows in full."""

INDEX_PAGE = 64
DENSE_LATENT_BACKENDS = ("trtllm", "trtllm_mla")
"""Backends that keep an fp8 latent as plain elements (576 B) instead of packed (656 B)."""

UTILIZATION = 0.88
"""Assumed `mem_fraction_static` where none is given; SGLang derives it from the device."""
