"""The caches that layers of the known kinds need, built from a configuration's fields."""

from __future__ import annotations

from kvern.spec.codec import FP32
from kvern.spec.configs.reader import Config
from kvern.spec.content import Heads, Index, Latent, State, StatePart
from kvern.spec.layers import KVCacheSpec
from kvern.spec.reach import All, Chunk, Last, Reach, Window

Caches = tuple[KVCacheSpec, ...]

TORCH_DTYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}


def heads(config: Config, reach: Reach) -> Caches:
    """Keys and values per KV head; values may be narrower than keys (`v_head_dim`)."""
    value_dim = config.optional_integer("v_head_dim")
    key_dim = config.head_dim
    return (KVCacheSpec(Heads(config.num_kv_heads, key_dim, value_dim or key_dim), reach),)


def full_attention(config: Config) -> Caches:
    """Heads that see every token."""
    return heads(config, All())


def sliding_attention(config: Config) -> Caches:
    """Heads that see the last `sliding_window` tokens, the query itself included."""
    return heads(config, Window(config.integer("sliding_window", "window_size")))


def chunked_attention(config: Config) -> Caches:
    """Heads that see their own chunk of `attention_chunk_size` tokens."""
    return heads(config, Chunk(config.integer("attention_chunk_size")))


def latent_attention(config: Config) -> Caches:
    """MLA: the compressed vector and the rotary key, shared by all heads."""
    rope_dim = config.integer("qk_rope_head_dim", minimum=0)
    return (KVCacheSpec(Latent(config.integer("kv_lora_rank"), rope_dim), All()),)


def index_keys(config: Config) -> Caches:
    """Sparse attention's index key of one head, beside whatever it selects from."""
    return (KVCacheSpec(Index(config.integer("index_head_dim", "indexer_head_dim")), All()),)


def indexed_latent_attention(config: Config) -> Caches:
    """MLA with an index key per token (DeepSeek-V3.2, GLM-5)."""
    return latent_attention(config) + index_keys(config)


def indexed_attention(config: Config) -> Caches:
    """Grouped heads with an index key per token (MiniMax-M3, Qwen sparse attention)."""
    return full_attention(config) + index_keys(config)


def no_cache(config: Config) -> Caches:
    """A layer that only feeds forward."""
    return ()


def activation_dtype(config: Config) -> str:
    """The dtype that a state's convolution columns have: the model's own, bf16 if not stated."""
    return TORCH_DTYPES.get(config.text("torch_dtype", "dtype") or "", "bf16")


def state(*parts: StatePart) -> Caches:
    """A recurrent state of the given parts."""
    return (KVCacheSpec(State(parts), Last()),)


def conv_columns(config: Config, channels: int, kernel: int) -> StatePart:
    """The inputs that a causal convolution still needs: its kernel less the current column."""
    return StatePart("conv", (channels, kernel - 1), activation_dtype(config))


def recurrent(*shape: int) -> StatePart:
    """A recurrence's accumulator: always float32, whatever dtype an engine may round it to."""
    return StatePart("recurrent", shape, "fp32")


def gated_delta_net(config: Config) -> Caches:
    """Gated delta net (Qwen3-Next): a key x value matrix per value head, q/k/v convolution."""
    key_heads = config.integer("linear_num_key_heads")
    value_heads = config.integer("linear_num_value_heads")
    key_dim = config.integer("linear_key_head_dim")
    value_dim = config.integer("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    conv = conv_columns(config, channels, config.integer("linear_conv_kernel_dim", minimum=2))
    return state(conv, recurrent(value_heads, key_dim, value_dim))


def kimi_delta_attention(config: Config) -> Caches:
    """Kimi delta attention: a dim x dim matrix per head, convolutions over q, k and v."""
    nested = config.table("linear_attn_config")
    num_heads = nested.optional_integer("num_heads") or config.integer("linear_num_heads")
    dim = nested.optional_integer("head_dim") or config.integer("linear_head_dim")
    kernel = nested.optional_integer("short_conv_kernel_size") or config.integer(
        "linear_conv_kernel_dim", "short_conv_kernel_size", minimum=2
    )
    return state(conv_columns(config, 3 * num_heads * dim, kernel), recurrent(num_heads, dim, dim))


def lightning_attention(config: Config) -> Caches:
    """Lightning attention: a dim x dim matrix per head and no convolution."""
    num_heads = config.optional_integer("lightning_nh") or config.num_heads
    dim = config.optional_integer("lightning_head_dim") or config.head_dim
    return state(recurrent(num_heads, dim, dim))


def mamba1(config: Config) -> Caches:
    """Mamba: one state vector per channel of the expanded width."""
    expand = config.optional_integer("mamba_expand", "expand") or 2
    channels = config.optional_integer("intermediate_size_mamba") or expand * config.hidden_size
    kernel = config.integer("mamba_d_conv", "conv_kernel", minimum=2)
    dim = config.integer("mamba_d_state", "state_size")
    return state(conv_columns(config, channels, kernel), recurrent(channels, dim))


def mamba2(config: Config) -> Caches:
    """Mamba-2: a head_dim x state matrix per head, convolution over x, B and C."""
    num_heads = config.integer("mamba_n_heads", "mamba_num_heads")
    head_dim = config.integer("mamba_d_head", "mamba_head_dim")
    num_groups = config.integer("mamba_n_groups", "n_groups", "mamba_num_groups", default=1)
    dim = config.integer("mamba_d_state", "ssm_state_size", "state_size")
    kernel = config.integer("mamba_d_conv", "conv_kernel", minimum=2)
    channels = num_heads * head_dim + 2 * num_groups * dim
    return state(conv_columns(config, channels, kernel), recurrent(num_heads, head_dim, dim))


def short_convolution(config: Config) -> Caches:
    """LFM2's gated short convolution: the last columns of its input, nothing else."""
    kernel = config.integer("conv_L_cache", minimum=2)
    return state(conv_columns(config, config.hidden_size, kernel))


def compressor_inputs(dim: int, reach: Reach) -> KVCacheSpec:
    """Candidate and gate of every token that a compressed entry is still to be made from.

    They are kept in float32 whatever the KV format: an entry is a softmax-weighted sum of them.
    """
    return KVCacheSpec(Heads(1, dim, dim), reach, 1, FP32, FP32, follows_format=False)
