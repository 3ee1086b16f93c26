"""Networks to compare: small ones of our own, and whatever a specification names."""

from .alexnet import alexnet
from .atoms import (
    AtomConv2d,
    Decomposed,
    atom_layers,
    decompose,
    freeze,
    load_atoms,
    recompose,
    share_coefficients,
    with_atoms,
)
from .cifar_resnet import cifar_resnet
from .dynamic_vit import DynamicViT, dynamic_vit, with_dynamic_tokens
from .efficientnet import efficientnet_lite0, efficientnet_lite1, efficientnet_lite2
from .inception import inception_v1
from .normalise import Normalise, parse_normalisation
from .registry import build_model, list_models
from .resnet import resnet18, resnet34, resnet50, resnet101, resnet152
from .small_cnn import small_cnn
from .specification import NamedModel, open_model, weights_of, with_name
from .tiny10 import tiny10
from .tokenise import Tokenise
from .vgg import vgg11, vgg11_bn
from .vit import vit
from .weights import load_weights, read_weights

__all__ = [
    "AtomConv2d",
    "Decomposed",
    "DynamicViT",
    "NamedModel",
    "Normalise",
    "Tokenise",
    "alexnet",
    "atom_layers",
    "build_model",
    "cifar_resnet",
    "decompose",
    "dynamic_vit",
    "efficientnet_lite0",
    "efficientnet_lite1",
    "efficientnet_lite2",
    "freeze",
    "inception_v1",
    "list_models",
    "load_atoms",
    "load_weights",
    "open_model",
    "parse_normalisation",
    "read_weights",
    "recompose",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "share_coefficients",
    "small_cnn",
    "tiny10",
    "vgg11",
    "vgg11_bn",
    "vit",
    "weights_of",
    "with_atoms",
    "with_dynamic_tokens",
    "with_name",
]
