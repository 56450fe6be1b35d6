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
COMPRESSED_WINDOW_RATIO = Fraction(1, 10)
"""The same share for compressed attention, whose windows are short."""

COMPRESSED_PAGE = 256
COMPRESSED_REQUESTS = 256
COMPRESSED_SCALES = 8
"""Bytes of scales beside an entry's fp8 elements."""

OVERLAPPING_STRIDE = 4
"""A compressor of this stride or less looks back over two groups of tokens instead of one."""

COMPRESSED_STATES_BY_REQUEST = (
    (Since(), False),
    (Since(release=(0, 5, 13)), True),
)
"""Whether a long compressor's open state is kept by request, not as a share of the window pool.

Before, the draft layer's windows were also counted whether it was used or not; since then it
makes a token dearer by one layer's share where drafts are used."""

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
