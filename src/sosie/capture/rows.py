"""Activations become rows (rows, features) by a named rule; padding is left out where a mask says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batches import DECODER_MASK, MASK, BadBatch, is_parts, with_tensors
from .sites import NoRows, Site

Rule = str | Callable[[Tensor], Tensor]
RULES = ("flatten", "mean", "positions", "cls", "last")


def to_rows(activation: Tensor, rule: Rule, *, site: Site, inputs: int, mask: Tensor | None = None) -> Tensor:
    """One site's activation as (rows, features), in float32 or float64.

    "flatten": one row per input, everything in it. "mean": averaged over space or tokens. "positions": one row per
    pixel or token, ordered by input, then position. "cls", "last": the first, the last token. Or a function
    from the activation to (inputs, features). An activation of two dimensions is rows already. `mask`
    (inputs, tokens) is 0 at padding, which counts under no rule; "flatten" has no way to leave it out. A site gives
    no rows where it is not known which of its numbers are padding.
    """
    if callable(rule):
        rows = rule(activation)
        if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != inputs:
            got = _shape(rows) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"the row rule must return ({inputs} inputs, features); at site {site.label!r} it made {got} "
                f"of {_shape(activation)}"
            )
        return _wide_enough(rows)
    check_rule(rule)
    if activation.ndim == 0 or len(activation) != inputs:
        raise NoRows(
            site.label,
            f"has shape {_shape(activation)} for {inputs} inputs: its first dimension does not count them",
            "Give a function as rule that returns (inputs, features), e.g. lambda x: x.transpose(0, 1).flatten(1) "
            "where time comes first",
        )
    if not activation.numel():
        raise NoRows(site.label, f"has shape {_shape(activation)}: there is nothing in it", "Choose other sites")
    if mask is not None and activation.ndim != 3:
        mask = _mask_of_others(mask, rule, activation, site)
    if activation.ndim <= 2:
        return _wide_enough(activation.reshape(inputs, -1))
    if rule == "flatten":
        if mask is not None and not bool(mask.all()):
            raise ValueError(
                f"the batch has padded tokens, which flattened rows of site {site.label!r} would count: "
                "use the rule mean, positions, cls or last"
            )
        return _wide_enough(activation.flatten(1))
    if site.channels_last is None:
        raise NoRows(
            site.label,
            f"has shape {_shape(activation)}, and it is not known which dimension holds the features",
            f"Rule {rule!r} has to know: give a function as rule that returns (inputs, features), e.g. "
            "lambda x: x.flatten(1, -2).mean(1) where they come last, lambda x: x.flatten(2).mean(2) where they come "
            "second; or rows='flatten'",
        )
    keep = None if mask is None else token_mask(mask, rule, activation, site=site)
    if rule in ("cls", "last"):
        return _one_token(activation, rule, keep, site=site)
    if rule == "mean":
        return _mean(activation, site, keep)
    assert rule == "positions", f"rule {rule!r} is in RULES, and to_rows has no branch for it"
    ordered = activation if site.channels_last else activation.movedim(1, -1)
    rows = ordered.reshape(-1, ordered.shape[-1])
    if keep is not None:
        # Looked up where the mask is, mostly on the CPU: on the GPU it would wait for the forward.
        rows = rows[keep.flatten().nonzero().flatten().to(rows.device)]
    return _wide_enough(rows)


def gives_several_rows(rule: Rule) -> bool:
    """Whether one input may give several rows, which are then correlated."""
    return rule == "positions"


def rows_per_input(site: Site, rule: Rule) -> int:
    """Rows that one input gives: 1, or its pixels or tokens (less the padded ones)."""
    check_rule(rule)
    if not gives_several_rows(rule) or len(site.shape) < 2:
        return 1
    return math.prod(site.shape[:-1] if site.channels_last else site.shape[1:])


def needs_axes(rule: Rule) -> bool:
    """Whether the rule has to know which dimension holds the features."""
    return not callable(rule) and rule != "flatten"


def check_rule(rule: Rule) -> None:
    """Raise unless this is one of the rules, or a function."""
    if not callable(rule) and rule not in RULES:
        raise ValueError(f"no row rule {rule!r}: there are {', '.join(RULES)}, or a function")


def token_mask(mask: Tensor, rule: str, activation: Tensor, *, site: Site) -> Tensor | None:
    """True at the tokens that count; None when all of them do."""
    tokens = activation.shape[1] if site.channels_last else activation.shape[2]
    if mask.shape != (len(activation), tokens):
        raise NoRows(
            site.label,
            f"has {tokens} tokens for each of {len(activation)} inputs, but the padding mask is {_shape(mask)}",
            "Choose sites that keep the tokens, or give a function as rule",
        )
    keep = mask != 0
    empty = (~keep.any(dim=1)).nonzero().flatten().tolist()
    if empty and not gives_several_rows(rule):
        raise ValueError(f"site {site.label!r}: input {empty[0]} of the batch has no token but padding")
    return None if bool(keep.all()) else keep


def _mask_of_others(mask: Tensor, rule: Rule, activation: Tensor, site: Site) -> Tensor | None:
    """The mask for an activation that is not (inputs, tokens, features); None where nothing in it is padding."""
    tokens, (_, *shape) = mask.shape[1], activation.shape
    if bool(mask.all()) or (len(shape) < 2 and shape != [tokens]):
        return None
    if rule == "mean" and site.channels_last and len(shape) > 2 and shape[0] == tokens and tokens not in shape[1:-1]:
        return mask
    raise NoRows(
        site.label,
        f"has shape {_shape(activation)}, and it is not known what in it belongs to the padded tokens of the batch",
        "Choose sites of shape (inputs, tokens, features), or give a function as rule that leaves padding out",
    )


def _mean(activation: Tensor, site: Site, keep: Tensor | None) -> Tensor:
    # Half precision is widened inside the sum: a mean over many pixels would lose digits in it.
    wide = torch.float64 if activation.dtype == torch.float64 else torch.float32
    space = tuple(range(1, activation.ndim - 1)) if site.channels_last else tuple(range(2, activation.ndim))
    if keep is None:
        return activation.mean(space, dtype=wide)
    keep = keep.to(activation.device)
    dropped = ~(keep.view(*keep.shape, *[1] * (activation.ndim - 2)) if site.channels_last else keep.unsqueeze(1))
    # masked_fill and not a product with the mask: padding may hold NaN.
    total = activation.masked_fill(dropped, 0).sum(space, dtype=wide)
    return total / (keep.sum(1, keepdim=True) * math.prod(activation.shape[2:-1]))


def _one_token(activation: Tensor, rule: str, keep: Tensor | None, *, site: Site) -> Tensor:
    if activation.ndim != 3 or not site.channels_last:
        raise NoRows(
            site.label,
            f"is a feature map of shape {_shape(activation)}, and rule {rule!r} needs tokens",
            "Use mean, positions or flatten",
        )
    if keep is None:
        return _wide_enough(activation[:, 0 if rule == "cls" else -1])
    order = torch.arange(keep.shape[1], device=keep.device)
    # Padding may stand on the left, so the first token is looked for as well.
    chosen = torch.where(keep, order, -1).amax(1) if rule == "last" else keep.int().argmax(1)
    inputs = torch.arange(len(keep), device=activation.device)
    return _wide_enough(activation[inputs, chosen.to(activation.device)])


def _wide_enough(rows: Tensor) -> Tensor:
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


# Which tokens of a batch are padding, and at which sites: read from what the model is called with

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
        got = (
            f"has {others[0].item():g} in it"
            if len(others)
            else f"is 0 everywhere, in {str(mask.dtype).removeprefix('torch.')}"
        )
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
    unread: tuple[str, int] | None = None  # an argument that may be a mask, if there is no other, and its tokens

    @classmethod
    def of(cls, *arguments: Any, unread: Callable[[], tuple[str, int] | None] = lambda: None) -> Masks:
        """From the arguments of a call, or the batch they came from: the first that has a mask decides."""
        inner = [part[0] if is_parts(part) and part else part for part in arguments]
        given = [part for part in inner if isinstance(part, Mapping)]
        keys = {key for part in given for key in part}
        first = next((part for part in given if MASK in part or DECODER_MASK in part), {})
        tokens, decoder = mask_of(first), mask_of(first, DECODER_MASK)
        halves = bool(keys & {DECODER_MASK, *(f"decoder_{key}" for key in _TOKENS)})
        if halves:
            tokens = _ones(given, "") if tokens is None else tokens
            decoder = _ones(given, "decoder_") if decoder is None else decoder
        return cls(tokens, decoder, halves, "pixel_values" in keys, unread() if tokens is None and not halves else None)

    def at(self, site: Site, activation: Tensor) -> Tensor | None:
        """The mask of the tokens that a site sees; None where all of them count, or where it sees none."""
        if activation.ndim < 2:
            return None
        if self.unread is not None and activation.ndim > 2 and self.unread[1] in activation.shape[1:]:
            raise NoRows(
                site.label,
                f"has shape {_shape(activation)}, and {self.unread[0]!r} of the call may tell which of its tokens are "
                "padding, or which are not",
                f"Give a batch with the mask as {MASK!r}, 1 at tokens and 0 at padding, and an inputs= that passes it "
                "on; or a function as rule, which counts everything",
            )
        parts = site.module_name.split(".")
        if not self.halves:
            sees_images = self.images and any(part.startswith(("vision", "visual", "image")) for part in parts)
            if self.images and activation.ndim > 3 and self.tokens is not None:
                sees_images |= self.tokens.shape[1] not in activation.shape[1:]
            return None if sees_images else self.tokens
        half = next((part for part in parts if part in ("encoder", "decoder")), None)
        if half is not None:
            return self.tokens if half == "encoder" else self.decoder
        first = activation.ndim != 3 or site.channels_last is not False
        count = activation.shape[1] if first else activation.shape[2]
        fits = [mask for mask in (self.tokens, self.decoder) if mask is not None and mask.shape[1] == count]
        if len(fits) == 2 and not torch.equal(fits[0] != 0, fits[1] != 0):
            raise ValueError(
                f"site {site.label!r} may see the encoder's tokens or the decoder's, {count} per input each but "
                "padded differently: choose sites inside the encoder or the decoder"
            )
        return fits[0] if fits else self.tokens


def _ones(given: list[Mapping[str, Any]], prefix: str) -> Tensor | None:
    """All tokens count: where a model has two halves, a mask says how many tokens each has."""
    tokens = (part[prefix + key] for part in given for key in _TOKENS if part.get(prefix + key) is not None)
    first = next(tokens, None)
    return None if first is None else torch.ones(first.shape[:2], dtype=torch.bool)
