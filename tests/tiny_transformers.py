"""Tiny Hugging Face models, built from their configurations without any download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WORDS = 40  # size of every vocabulary; 0 is padding


def bert(seed: int = 0, **options: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    return _built(BertModel, BertConfig(vocab_size=WORDS, max_position_embeddings=32, **{**sizes, **options}), seed)


def gpt2(seed: int = 0) -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return _built(GPT2Model, GPT2Config(vocab_size=WORDS, n_embd=12, n_layer=3, n_head=2, n_positions=32, **ends), seed)


def llama(seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    return _built(LlamaModel, LlamaConfig(vocab_size=WORDS, max_position_embeddings=32, **sizes), seed)


def t5(seed: int = 0) -> nn.Module:
    from transformers import T5Config, T5Model

    return _built(T5Model, T5Config(vocab_size=WORDS, d_model=12, d_kv=6, num_layers=2, num_heads=2, d_ff=16), seed)


def vit(seed: int = 0, patch: int = 4) -> nn.Module:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return _built(ViTModel, ViTConfig(image_size=16, patch_size=patch, **sizes), seed)


def clip(seed: int = 0) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    text = {"vocab_size": WORDS, "max_position_embeddings": 32, **sizes, **ends}
    vision = {"image_size": 16, "patch_size": 8, **sizes}
    return _built(CLIPModel, CLIPConfig(text_config=text, vision_config=vision, projection_dim=8), seed)


def _built(kind: Any, config: Any, seed: int) -> nn.Module:
    """In float64: what must be equal can then be told from what is near."""
    torch.manual_seed(seed)
    model = kind(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # biases start at 0, and layers near the identity
    return model


def token_batch(
    n: int = 48, longest: int = 7, *, left: bool = False, garbage: int = 0, extra: int = 0
) -> dict[str, Tensor]:
    """Inputs of 2 to `longest` tokens; what stands in the padding, and how long it is, is told apart from them."""
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(3, WORDS, (n, longest), generator=random)
    lengths = torch.randint(2, longest + 1, (n, 1), generator=random)
    place = torch.arange(longest + extra)
    mask = place < lengths
    ids = nn.functional.pad(ids, (0, extra)).masked_fill(~mask, 0)
    ids = torch.where(mask, ids, torch.full_like(ids, garbage))
    if left:
        ids, mask = ids.clone(), mask.clone()
        for i, length in enumerate(lengths.flatten().tolist()):
            ids[i], mask[i] = ids[i].roll(longest + extra - length), mask[i].roll(longest + extra - length)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}
