"""Turn activations into rows (rows, features) by a named rule; padding is left out where a mask marks it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batches import DECODER_MASK, MASK, is_parts, with_tensors
from .sites import NoRows, Site

Rule = str | Callable[[Tensor], Tensor]
RULES = ("flatten", "mean", "positions", "cls", "last")  # and "grid(4)"
ONE_ROW = "rows='mean', for tokens also 'cls' or 'last'"  # in errors: rules with one row per input, whatever its size


def to_rows(activation: Tensor, rule: Rule, *, site: Site, inputs: int, mask: Tensor | None = None) -> Tensor:
    """Return one site's activation as (rows, features), in float32 or float64.

    "flatten": one row per input, with all numbers. "mean": the average over space or tokens. "positions": one row per
    pixel or token, ordered by input, then position. "grid(4)": feature maps averaged to 4 × 4 positions first, so that
    maps of different size have equally many rows. "cls", "last": the first, the last token. Or a function from the
    activation to (inputs, features). An activation of two dimensions already consists of rows. `mask` (inputs, tokens)
    is 0 at padding, which no rule counts; "flatten" cannot leave it out. A site gives no rows if it is unknown which of
    its numbers belong to padding.
    """
    if callable(rule):
        rows = rule(activation.clone())  # it may work in place, and the next layers read the activation
        if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != inputs:
            got = _shape(rows) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"the row rule must return ({inputs} inputs, features); at site {site.label!r} it returned {got} for "
                f"an activation of {_shape(activation)}"
            )
        return _wide_enough(rows)
    check_rule(rule)
    if activation.ndim == 0 or len(activation) != inputs:
        raise NoRows(
            site.label,
            f"has shape {_shape(activation)} for {inputs} inputs: its first dimension does not count them",
            "Give a function as row rule that returns (inputs, features), e.g. lambda x: x.transpose(0, 1).flatten(1) "
            "if time comes first",
        )
    if not activation.numel():
        raise NoRows(site.label, f"has shape {_shape(activation)}, which is empty", "Choose other sites")
    if (size := _grid(rule)) is not None:
        return _pooled(activation, size, site)
    if mask is not None and activation.ndim != 3:
        mask = _mask_of_other_shapes(mask, rule, activation, site)
    if activation.ndim <= 2:
        return _wide_enough(activation.reshape(inputs, -1))
    if rule == "flatten":
        if mask is not None and not bool(mask.all()):
            raise ValueError(
                f"the batch has padded tokens, which flattened rows of site {site.label!r} would include: use the rule "
                "mean, positions, cls or last (rows='mean', --rows mean)"
            )
        return _wide_enough(activation.flatten(1))
    if site.channels_last is None:
        raise NoRows(
            site.label,
            f"has shape {_shape(activation)}, and it is unknown which dimension holds the features",
            f"Rule {rule!r} needs this: give a function as row rule that returns (inputs, features), e.g. "
            "lambda x: x.flatten(1, -2).mean(1) if they come last, lambda x: x.flatten(2).mean(2) if they come second; "
            "or use rows='flatten'",
        )
    keep = None if mask is None else token_mask(mask, rule, activation, site=site)
    if rule in ("cls", "last"):
        return _one_token(activation, rule, keep, site=site)
    if rule == "mean":
        return _mean(activation, site, keep)
    assert rule == "positions", f"to_rows has no branch for the rule {rule!r}"
    ordered = activation if site.channels_last else activation.movedim(1, -1)
    rows = ordered.reshape(-1, ordered.shape[-1])
    if keep is not None:
        # Indices are found on the mask's device, mostly the CPU: on the GPU this would wait for the forward.
        rows = rows[keep.flatten().nonzero().flatten().to(rows.device)]
    return _wide_enough(rows)


def gives_several_rows(rule: Rule) -> bool:
    """Return whether one input may give several rows, which are then correlated."""
    return rule == "positions" or (isinstance(rule, str) and _grid(rule) is not None)


def _grid(rule: Rule) -> int | None:
    """The size of the rule "grid(size)"; None for other rules."""
    if callable(rule) or (match := re.fullmatch(r"grid\(([1-9]\d*)\)", rule)) is None:
        return None
    return int(match[1])


def _pooled(activation: Tensor, size: int, site: Site) -> Tensor:
    """One row per position of a feature map that is averaged to size × size, as by `adaptive_avg_pool2d`."""
    shape, grid = _shape(activation), f"grid({size})"
    if activation.ndim != 4 or site.channels_last is None:
        raise NoRows(
            site.label, f"has shape {shape}, which is no feature map, for rule {grid!r}", "Choose sites of convolutions"
        )
    maps = activation.movedim(-1, 1) if site.channels_last else activation
    if min(maps.shape[2:]) < size:
        raise NoRows(
            site.label,
            f"has {maps.shape[2]} × {maps.shape[3]} positions, fewer than rule {grid!r} asks for",
            f"Take rows='grid({min(maps.shape[2:])})', or other sites",
        )
    pooled = torch.nn.functional.adaptive_avg_pool2d(_wide_enough(maps), size)
    return pooled.movedim(1, -1).reshape(-1, maps.shape[1])


def rows_per_input(site: Site, rule: Rule) -> int:
    """Return the number of rows per input: 1, or its pixels or tokens (padding included)."""
    check_rule(rule)
    if (size := _grid(rule)) is not None:
        return size**2
    if not gives_several_rows(rule) or len(site.shape) < 2:
        return 1
    return math.prod(site.shape[:-1] if site.channels_last else site.shape[1:])


def needs_axes(rule: Rule) -> bool:
    """Return whether the rule needs to know which dimension holds the features."""
    return not callable(rule) and rule != "flatten"


def check_rule(rule: Rule) -> None:
    """Raise unless this is a function or the name of a rule."""
    if not callable(rule) and rule not in RULES and _grid(rule) is None:
        raise ValueError(f"no row rule {rule!r}: there are {', '.join(RULES)}, grid(4), or a function")


def rule_name(rule: Rule) -> str:
    """Return the name of a rule, which for a function is its own."""
    return rule if isinstance(rule, str) else getattr(rule, "__name__", "function")


def token_mask(mask: Tensor, rule: str, activation: Tensor, *, site: Site) -> Tensor | None:
    """Return True at real tokens; None if there is no padding."""
    tokens = activation.shape[1] if site.channels_last else activation.shape[2]
    if mask.shape != (len(activation), tokens):
        raise NoRows(
            site.label,
            f"has {tokens} tokens for each of {len(activation)} inputs, but the padding mask is {_shape(mask)}",
            "Choose sites that keep the tokens, or give a function as row rule",
        )
    keep = mask != 0
    empty = (~keep.any(dim=1)).nonzero().flatten().tolist()
    if empty and not gives_several_rows(rule):
        raise ValueError(f"site {site.label!r}: input {empty[0]} of the batch has no token but padding")
    return None if bool(keep.all()) else keep


def _mask_of_other_shapes(mask: Tensor, rule: Rule, activation: Tensor, site: Site) -> Tensor | None:
    """Return the mask for an activation that is not (inputs, tokens, features); None if it holds no padding."""
    tokens, (_, *shape) = mask.shape[1], activation.shape
    if bool(mask.all()) or (len(shape) < 2 and shape != [tokens]):
        return None
    if rule == "mean" and site.channels_last and len(shape) > 2 and shape[0] == tokens and tokens not in shape[1:-1]:
        return mask
    raise NoRows(
        site.label,
        f"has shape {_shape(activation)}, and it is unknown which numbers belong to the padded tokens of the batch",
        "Choose sites of shape (inputs, tokens, features), or give a function as row rule that leaves padding out",
    )


def _mean(activation: Tensor, site: Site, keep: Tensor | None) -> Tensor:
    # Half precision is widened inside the sum, since a mean over many pixels would lose digits.
    wide = torch.float64 if activation.dtype == torch.float64 else torch.float32
    space = tuple(range(1, activation.ndim - 1)) if site.channels_last else tuple(range(2, activation.ndim))
    if keep is None:
        return activation.mean(space, dtype=wide)
    keep = keep.to(activation.device)
    dropped = ~(keep.view(*keep.shape, *[1] * (activation.ndim - 2)) if site.channels_last else keep.unsqueeze(1))
    # masked_fill, since padding may hold NaN, which a product with the mask would keep.
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
    # Padding may be on the left, so the first token is searched too.
    chosen = torch.where(keep, order, -1).amax(1) if rule == "last" else keep.int().argmax(1)
    inputs = torch.arange(len(keep), device=activation.device)
    return _wide_enough(activation[inputs, chosen.to(activation.device)])


def _wide_enough(rows: Tensor) -> Tensor:
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


# The padding of a batch, and which sites see it: read from the arguments of the model

_TOKENS = ("input_ids", "inputs_embeds")


def mask_of(batch: Any, key: str = MASK) -> Tensor | None:
    """Return the padding mask (inputs, tokens) of a dict, alone or the first of a pair, on the CPU; else None."""
    if is_parts(batch) and batch:
        batch = batch[0]
    mask = with_tensors(batch.get(key)) if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim != 2:
        # Without an error, padding would count as tokens.
        raise ValueError(f"{key} has shape {tuple(mask.shape)}; the padding mask must be (inputs, tokens), 1 at tokens")
    mask = mask.cpu()  # once, since every site looks up rows in it
    others = mask[(mask != 0) & (mask != 1)]
    # Without padding an additive mask is all 0, which would mean nothing but padding.
    if len(others) or (mask.is_floating_point() and mask.numel() and not mask.any()):
        dtype = str(mask.dtype).removeprefix("torch.")
        raise ValueError(
            f"{key} {f'has {others[0].item():g} in it' if len(others) else f'is 0 everywhere, in {dtype}'}: it looks "
            "like a mask that is added to the scores. Give the padding mask, 1 (or True) at tokens and 0 (or False) at "
            "padding; transformers makes the additive one from it"
        )
    return mask


@dataclass(frozen=True)
class TokenMasks:
    """The padding masks of one batch: of its tokens, and of the decoder's if the model has an encoder and a decoder."""

    tokens: Tensor | None
    decoder: Tensor | None = None
    halves: bool = False  # whether a decoder gets inputs of its own
    images: bool = False  # whether images go in beside the tokens
    unread: tuple[str, int] | None = None  # an argument that may be a mask without being read, and its tokens

    @classmethod
    def of(cls, *arguments: Any, unread: Callable[[], tuple[str, int] | None] = lambda: None) -> TokenMasks:
        """Read the masks from the arguments of a call, or the batch behind them: the first with a mask decides."""
        parts = [part[0] if is_parts(part) and part else part for part in arguments]
        dicts = [part for part in parts if isinstance(part, Mapping)]
        keys = {key for part in dicts for key in part}
        first = next((part for part in dicts if MASK in part or DECODER_MASK in part), {})
        tokens, decoder = mask_of(first), mask_of(first, DECODER_MASK)
        halves = bool(keys & {DECODER_MASK, *(f"decoder_{key}" for key in _TOKENS)})
        if halves:
            tokens = _ones(dicts, "") if tokens is None else tokens
            decoder = _ones(dicts, "decoder_") if decoder is None else decoder
        return cls(tokens, decoder, halves, "pixel_values" in keys, unread() if tokens is None and not halves else None)

    def of_output(self) -> Tensor | None:
        """Return the mask of the tokens that a model answers for: the decoder's if it has one."""
        return self.tokens if self.decoder is None else self.decoder

    def at(self, site: Site, activation: Tensor) -> Tensor | None:
        """Return the mask of the tokens that a site sees; None if all of them count, or if it sees none."""
        if activation.ndim < 2:
            return None
        if self.unread is not None and activation.ndim > 2 and self.unread[1] in activation.shape[1:]:
            raise NoRows(
                site.label,
                f"has shape {_shape(activation)}, and it is unknown whether {self.unread[0]!r} of the call marks its "
                "padded tokens",
                f"Give a batch with the mask as {MASK!r}, 1 at tokens and 0 at padding, and pass it on with inputs=; "
                "or give a function as row rule, which counts everything",
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
                f"site {site.label!r} may see the encoder's tokens or the decoder's, {count} per input each but padded "
                "differently: choose sites inside the encoder or the decoder"
            )
        return fits[0] if fits else self.tokens


def _ones(dicts: list[Mapping[str, Any]], prefix: str) -> Tensor | None:
    """Return a mask that counts all tokens: with an encoder and a decoder, it tells how many tokens each has."""
    tokens = (part[prefix + key] for part in dicts for key in _TOKENS if part.get(prefix + key) is not None)
    first = next(tokens, None)
    return None if first is None else torch.ones(first.shape[:2], dtype=torch.bool)
