"""Small networks for tests of `diff`, and how to change them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.skip = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu() + self.skip(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block1, self.block2, self.block3 = (Residual(8) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(self.stem(x).relu())))
        return self.head(x.mean((2, 3)))


def jiggled(model: Model) -> Model:
    """The model in evaluation mode with weights and statistics as after a training, always the same."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.ndim:
                tensor.copy_(torch.randn(tensor.shape, generator=random) / max(1, tensor[0].numel()) ** 0.5)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for positive in (module.running_var, module.weight):
                    assert positive is not None
                    positive.copy_(torch.rand(positive.shape, generator=random) + 0.5)
    return model.eval()


def images() -> Tensor:
    return torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def edited(model: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    """A copy of a model, changed."""
    changed = copy.deepcopy(model)
    change(changed)
    return changed


def decoder(name: str, attention: str) -> nn.Module:
    """A small transformer in float32 with this kernel of attention."""
    transformers = __import__("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    common = {"vocab_size": 99, "attn_implementation": attention}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    if name == "llama":
        config = transformers.LlamaConfig(max_position_embeddings=64, num_key_value_heads=2, **sizes, **common)
        model = transformers.LlamaForCausalLM(config)
    elif name == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, **ends, **common)
        try:
            model = transformers.GPT2LMHeadModel(config)
        except ValueError as error:  # before transformers 4.42
            if "does not support an attention implementation" not in str(error):
                raise
            pytest.skip("this transformers has no such kernel for GPT-2")
    else:
        model = transformers.BertModel(transformers.BertConfig(max_position_embeddings=64, **sizes, **common))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.1 + (parameter.ndim == 1))
    return model.eval()


def padded_tokens(*, left: bool = False) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(3)
    ids, lengths = torch.randint(3, 99, (16, 12), generator=random), torch.arange(16) % 6 + 7
    mask = (torch.arange(12) < lengths[:, None]).long()
    return [{"input_ids": ids, "attention_mask": mask.flip(1) if left else mask}]


class Attention(nn.Module):
    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))


class Decoder(nn.Module):
    def __init__(self, width: int = 24, layers: int = 3) -> None:
        super().__init__()
        self.emb, self.layers = nn.Embedding(50, width), nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class OtherAttention(nn.Module):
    """The same attention with one layer for q, k and v."""

    def __init__(self, a: Attention) -> None:
        super().__init__()
        self.heads, self.c_attn, self.c_proj = (
            a.heads,
            nn.Linear(a.q.in_features, 3 * a.q.in_features),
            copy.deepcopy(a.o),
        )
        for name in ("weight", "bias"):
            getattr(self.c_attn, name).data = torch.cat([getattr(part, name).data for part in (a.q, a.k, a.v)])

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(z).chunk(3, -1))
        return self.c_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OtherDecoder(nn.Module):
    """A port of `Decoder` by somebody else: other names, other parts, the same function."""

    class Block(nn.Module):
        def __init__(self, layer: Layer) -> None:
            super().__init__()
            self.ln_1, self.mha, self.ln_2 = (
                copy.deepcopy(layer.n1),
                OtherAttention(layer.attn),
                copy.deepcopy(layer.n2),
            )
            self.mlp = nn.Sequential(copy.deepcopy(layer.up), nn.GELU(), copy.deepcopy(layer.down))

        def forward(self, z: Tensor) -> Tensor:
            z = z + self.mha(self.ln_1(z))
            return z + self.mlp(self.ln_2(z))

    def __init__(self, a: Decoder) -> None:
        super().__init__()
        self.wte, self.ln_f, self.lm = copy.deepcopy(a.emb), copy.deepcopy(a.norm), copy.deepcopy(a.head)
        self.h = nn.ModuleList(self.Block(layer) for layer in a.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.wte(tokens)
        for block in self.h:
            z = block(z)
        return self.lm(self.ln_f(z))
