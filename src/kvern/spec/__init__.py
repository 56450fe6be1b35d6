"""What a model needs from its cache: content x reach, codecs, page layout, groups, budget.

Standard library only, and no tensor: everything here is arithmetic on configurations and file
headers, so the planner, the simulator and the engine share one set of numbers.
"""

from kvern.spec.budget import blocks_for, bytes_for_context, format_size, parse_size
from kvern.spec.codec import KV_FORMATS, Codec, parse_kv_format
from kvern.spec.content import Content, Heads, Index, Latent, State, StatePart
from kvern.spec.groups import make_kv_groups, make_kv_plan
from kvern.spec.layers import KVCacheSpec, LayerSpec, ModelSpec
from kvern.spec.pages import KVGroup, KVPlan, StreamOffset, layer_offsets
from kvern.spec.reach import All, Chunk, Last, Reach, Span, Window

__all__ = [
    "KV_FORMATS",
    "All",
    "Chunk",
    "Codec",
    "Content",
    "Heads",
    "Index",
    "KVCacheSpec",
    "KVGroup",
    "KVPlan",
    "Last",
    "Latent",
    "LayerSpec",
    "ModelSpec",
    "Reach",
    "Span",
    "State",
    "StatePart",
    "StreamOffset",
    "Window",
    "blocks_for",
    "bytes_for_context",
    "format_size",
    "layer_offsets",
    "make_kv_groups",
    "make_kv_plan",
    "parse_kv_format",
    "parse_size",
]
