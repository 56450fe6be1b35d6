"""From a layer's description to its mixer with a recurrent state, with weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import HostTensor
from kvern.models.config import DeltaNetConfig, MambaConfig, ShortConvConfig
from kvern.models.loader import Loader, bias_name
from kvern.models.recurrent import DeltaNet, Mamba, ShortConv, StateWeights
from kvern.models.weights import take_rows

F32 = npt.NDArray[np.float32]


def state_mixer(loader: Loader, index: int) -> DeltaNet | Mamba | ShortConv:
    """One layer's mixer."""
    config = loader.config.layers[index].state
    if isinstance(config, DeltaNetConfig):
        return DeltaNet(config, _delta_net(loader, index, config))
    if isinstance(config, MambaConfig):
        return Mamba(config, _mamba(loader, index, config))
    assert isinstance(config, ShortConvConfig)
    return ShortConv(config, _short_conv(loader, index, config))


def _convolution(loader: Loader, index: int, channels: int, kernel: int) -> F32:
    name = loader.name(loader.names.state_conv, i=index)
    return np.ascontiguousarray(loader.source.array(name, channels, 1, kernel)[:, 0].T)


def _vector(loader: Loader, template: str, size: int, index: int) -> F32:
    return loader.source.vector(loader.name(template, i=index), size)


def _stacked(
    loader: Loader, templates: tuple[str, ...], rows: tuple[int, ...], index: int
) -> list[HostTensor]:
    """The matrices of a projection: one for all of ``rows``, or one for each."""
    if len(templates) == 1:
        rows = (sum(rows),)
    named = zip(templates, rows, strict=True)
    return [loader.matrix(name, size, loader.config.hidden_size, i=index) for name, size in named]


def _delta_net(loader: Loader, index: int, config: DeltaNetConfig) -> StateWeights:
    names, heads = loader.names, config.num_value_heads
    width = heads * config.value_dim
    inputs = _stacked(loader, names.state_inputs, (config.num_channels, width), index)
    gates = _stacked(loader, names.state_gates, (heads, heads), index)
    if len(inputs) == 1:
        inputs = [take_rows(inputs[0], delta_net_rows(config))]
        gates = [take_rows(gates[0], _gate_rows(config))]
    return StateWeights(
        inputs=loader.prepare(*inputs),
        inputs_bias=None,
        gates=loader.prepare(*gates),
        conv=_convolution(loader, index, config.num_channels, config.kernel),
        conv_bias=None,
        decay=-np.exp(_vector(loader, names.state_decay, heads, index)),
        step_bias=_vector(loader, names.state_step_bias, heads, index),
        norm=_vector(loader, names.state_norm, config.value_dim, index),
        norm_eps=loader.config.norm_eps,
        output=loader.prepare(
            loader.matrix(names.state_output, loader.config.hidden_size, width, i=index)
        ),
        output_bias=None,
    )


def delta_net_rows(config: DeltaNetConfig) -> npt.NDArray[np.int64]:
    """Rows of a matrix that holds, per key head, q, k, v and output gate: all q first, and so on."""
    values = config.num_value_heads // config.num_key_heads * config.value_dim
    borders = np.cumsum([config.key_dim, config.key_dim, values])
    size = int(borders[-1]) + values
    rows = np.arange(config.num_key_heads * size).reshape(config.num_key_heads, size)
    return np.concatenate([part.ravel() for part in np.split(rows, borders, axis=1)])


def _gate_rows(config: DeltaNetConfig) -> npt.NDArray[np.int64]:
    """Rows of a matrix that holds, per key head, b and a of its value heads: all b first."""
    group = config.num_value_heads // config.num_key_heads
    rows = np.arange(2 * config.num_value_heads).reshape(config.num_key_heads, 2, group)
    return np.concatenate([rows[:, 0].ravel(), rows[:, 1].ravel()])


def _mamba(loader: Loader, index: int, config: MambaConfig) -> StateWeights:
    names, heads, hidden = loader.names, config.num_heads, loader.config.hidden_size
    width, channels = heads * config.head_dim, config.num_channels
    [name] = names.state_inputs
    rows = width + channels + heads
    conv_bias = None
    if config.has_conv_bias:
        conv_bias = _vector(loader, bias_name(names.state_conv), channels, index)
    return StateWeights(
        inputs=loader.prepare(loader.matrix(name, rows, hidden, i=index)),
        inputs_bias=loader.bias(config.has_bias, (name, rows), i=index),
        conv=_convolution(loader, index, channels, config.kernel),
        conv_bias=conv_bias,
        decay=-np.exp(_vector(loader, names.state_decay, heads, index)),
        step_bias=_vector(loader, names.state_step_bias, heads, index),
        skip=_vector(loader, names.state_skip, heads, index),
        norm=_vector(loader, names.state_norm, width, index),
        norm_eps=loader.config.norm_eps,
        output=loader.prepare(loader.matrix(names.state_output, hidden, width, i=index)),
        output_bias=loader.bias(config.has_bias, (names.state_output, hidden), i=index),
    )


def _short_conv(loader: Loader, index: int, config: ShortConvConfig) -> StateWeights:
    names, hidden = loader.names, loader.config.hidden_size
    [name] = names.state_inputs
    conv_bias = None
    if config.has_bias:
        conv_bias = _vector(loader, bias_name(names.state_conv), hidden, index)
    return StateWeights(
        inputs=loader.prepare(loader.matrix(name, 3 * hidden, hidden, i=index)),
        inputs_bias=loader.bias(config.has_bias, (name, 3 * hidden), i=index),
        conv=_convolution(loader, index, hidden, config.kernel),
        conv_bias=conv_bias,
        output=loader.prepare(loader.matrix(names.state_output, hidden, hidden, i=index)),
        output_bias=loader.bias(config.has_bias, (names.state_output, hidden), i=index),
    )
