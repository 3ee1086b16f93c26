"""Where the features of an activation are: in the last dimension (tokens) or the second (feature maps)."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from .names import Names


class _Layout(NamedTuple):
    last: bool
    width: int | None  # number of features, where the module knows it


def is_channels_last(names: Names, name: str, shape: tuple[int, ...]) -> bool:
    """Whether the last dimension of an output of this shape (batch included) holds the features.

    Most layers say so by their class. An activation function is read like the layer registered before it,
    a block like the layers inside it, in both cases only if the widths fit; what remains undecided counts as
    tokens with three dimensions and as an NCHW map with more.
    """
    if len(shape) <= 2:
        return True
    own = _layout(names.by_name[name])
    if own is not None:
        return own.last
    evidence = _evidence(names, name)
    last = any(fact.last and fact.width == shape[-1] for fact in evidence)
    first = any(not fact.last and fact.width == shape[1] for fact in evidence)
    if len(shape) == 3:
        return last or not first
    return last and not first


def _evidence(names: Names, name: str) -> list[_Layout]:
    if not names.is_leaf(name):
        start = f"{name}." if name else ""
        facts = (_layout(module) for below, module in names.by_name.items() if below.startswith(start))
        return [fact for fact in facts if fact is not None]
    order = list(names.by_name)
    for other in reversed(order[: order.index(name)]):
        fact = _layout(names.by_name[other])
        if fact is not None:
            return [fact]
    return []


def _layout(module: nn.Module) -> _Layout | None:
    """What a layer's class says about its output; None for those that keep whatever comes in."""
    match module:
        case nn.Linear() | nn.Bilinear():
            return _Layout(True, module.out_features)
        case nn.Embedding() | nn.EmbeddingBag():
            return _Layout(True, module.embedding_dim)
        case nn.MultiheadAttention():
            return _Layout(True, module.embed_dim)
        case nn.RNNBase():
            return _Layout(True, (module.proj_size or module.hidden_size) * (1 + module.bidirectional))
        case nn.LayerNorm() | nn.RMSNorm():
            # Vision nets subclass LayerNorm to normalise NCHW maps: only its own forward keeps features last.
            plain = type(module).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward)
            return _Layout(True, module.normalized_shape[-1]) if plain else None
        case nn.modules.conv._ConvNd():
            return _Layout(False, module.out_channels)
        case nn.modules.batchnorm._NormBase():
            return _Layout(False, module.num_features)
        case nn.GroupNorm():
            return _Layout(False, module.num_channels)
    return _Layout(False, None) if isinstance(module, _CHANNELS_FIRST) else None


_CHANNELS_FIRST = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._LPPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.LocalResponseNorm,
    nn.Upsample,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
)
