"""Networks to compare: sosie's own architectures, and any model that a specification names."""

from .atoms import (
    AtomConv2d,
    Decomposition,
    atom_layers,
    decompose,
    freeze,
    load_atoms,
    recompose,
    share_coefficients,
    with_atoms,
)
from .convolutional import (
    alexnet,
    cifar_resnet,
    efficientnet_lite0,
    efficientnet_lite1,
    efficientnet_lite2,
    inception_v1,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    small_cnn,
    tiny10,
    vgg11,
    vgg11_bn,
)
from .specification import (
    NamedModel,
    Normalise,
    Tokenise,
    build_model,
    list_models,
    open_model,
    parse_normalisation,
    weights_of,
    with_name,
)
from .vit import DynamicViT, dynamic_vit, vit, with_dynamic_tokens
from .weights import load_weights, read_weights
