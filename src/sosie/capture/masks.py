"""Which tokens of a batch are padding, and at which sites: read from what the model is called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .sites import Site
from .structure import DECODER_MASK, MASK, BadBatch, is_parts, with_tensors

_TOKENS = ("input_ids", "inputs_embeds")


def mask_of(batch: Any, key: str = MASK) -> Tensor | None:
    """The padding mask (inputs, tokens) of a dict, alone or the first of a pair, on the CPU; else None."""
    if is_parts(batch) and batch:
        batch = batch[0]
    mask = with_tensors(batch.get(key)) if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim != 2:
        # Passing it by would count padding as tokens.
        raise BadBatch(f"{key} has shape {tuple(mask.shape)}; padding is read from (inputs, tokens), 1 at tokens")
    mask = mask.cpu()  # once: rows are looked up in it at every site
    others = mask[(mask != 0) & (mask != 1)]
    # Where nothing is padded, an additive mask is all 0, which would read as nothing but padding.
    if len(others) or (mask.is_floating_point() and mask.numel() and not mask.any()):
        got = f"has {others[0].item():g} in it" if len(others) else f"is 0 everywhere, in {_short(mask)}"
        raise BadBatch(
            f"{key} {got}: it looks like a mask that is added to the scores. Padding is read from 1 (or True) at "
            "tokens and 0 (or False) at padding; give that one, transformers makes the other from it"
        )
    return mask


@dataclass(frozen=True)
class Masks:
    """The padding masks of one batch: of its tokens, and of the decoder's where the model has two halves."""

    tokens: Tensor | None
    decoder: Tensor | None = None
    halves: bool = False  # whether a decoder is given inputs of its own
    images: bool = False  # whether images go in beside the tokens

    @classmethod
    def of(cls, *arguments: Any) -> Masks:
        """From the arguments of a call, or the batch they came from: the first that has a mask decides."""
        found = [part for part in map(_as_dict, arguments) if part]
        keys = {key for part in found for key in part}
        first = next((part for part in found if MASK in part or DECODER_MASK in part), {})
        tokens, decoder = mask_of(first), mask_of(first, DECODER_MASK)
        halves = bool(keys & {DECODER_MASK, *(f"decoder_{key}" for key in _TOKENS)})
        if halves:
            tokens = _ones(found, "") if tokens is None else tokens
            decoder = _ones(found, "decoder_") if decoder is None else decoder
        return cls(tokens, decoder, halves, "pixel_values" in keys)

    def at(self, site: Site, activation: Tensor) -> Tensor | None:
        """The mask of the tokens that a site sees; None where all of them count, or where it sees none."""
        if activation.ndim != 3:
            return None
        parts = site.module_name.split(".")
        if not self.halves:
            sees_images = self.images and any(part.startswith(("vision", "visual", "image")) for part in parts)
            return None if sees_images else self.tokens
        half = next((part for part in parts if part in ("encoder", "decoder")), None)
        if half is not None:
            return self.tokens if half == "encoder" else self.decoder
        count = activation.shape[2] if site.channels_last is False else activation.shape[1]
        fits = [mask for mask in (self.tokens, self.decoder) if mask is not None and mask.shape[1] == count]
        if len(fits) == 2 and not torch.equal(fits[0] != 0, fits[1] != 0):
            raise ValueError(
                f"site {site.label!r} may see the encoder's tokens or the decoder's, {count} an input each but "
                "padded differently: choose sites inside the encoder or the decoder"
            )
        return fits[0] if fits else self.tokens


def _as_dict(arguments: Any) -> Mapping[str, Any] | None:
    if is_parts(arguments) and arguments:
        arguments = arguments[0]
    return arguments if isinstance(arguments, Mapping) else None


def _ones(found: list[Mapping[str, Any]], prefix: str) -> Tensor | None:
    """All tokens count: where a model has two halves, a mask says how many tokens each has."""
    given = (part[prefix + key] for part in found for key in _TOKENS if part.get(prefix + key) is not None)
    tokens = next(given, None)
    return None if tokens is None else torch.ones(tokens.shape[:2], dtype=torch.bool)


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
