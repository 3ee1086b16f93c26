"""Activations become rows by a named rule: what comes after sees (rows, features)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .sites import NoRows, Site

Rule = str | Callable[[Tensor], Tensor]
RULES = ("flatten", "mean", "positions", "cls", "last")


def to_rows(activation: Tensor, rule: Rule, *, site: Site, inputs: int, mask: Tensor | None = None) -> Tensor:
    """One site's activation as (rows, features), in float32 or float64.

    "flatten": a row an input, everything in it. "mean": averaged over space or tokens. "positions": a row a
    pixel or token, ordered by input, then position. "cls", "last": the first, the last token. Or a function
    from the activation to (inputs, features). An activation of two dimensions is rows already. `mask`
    (inputs, tokens) is 0 at padding, which counts under no rule; "flatten" has no way to leave it out.
    """
    if callable(rule):
        return _by_function(activation, rule, site=site, inputs=inputs)
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
    if activation.ndim <= 2:
        return _wide_enough(activation.reshape(inputs, -1))
    mask = mask if activation.ndim == 3 else None  # it speaks of tokens: maps have none
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
            f"has shape {_shape(activation)}, and nothing tells which dimension holds the features",
            f"Rule {rule!r} has to know: give a function as rule that returns (inputs, features), e.g. "
            "lambda x: x.flatten(1, -2).mean(1) where they come last, lambda x: x.flatten(2).mean(2) where they come "
            "second; or rows='flatten'",
        )
    keep = None if mask is None else token_mask(mask, rule, activation, site=site)
    if rule in ("cls", "last"):
        return _one_token(activation, rule, keep, site=site)
    if rule == "mean":
        return _mean(activation, site, keep)
    return _positions(activation, site, keep)


def rows_per_input(site: Site, rule: Rule) -> int:
    """Rows that one input gives: 1, or under "positions" its pixels or tokens (less the padded ones)."""
    if callable(rule):
        return 1
    check_rule(rule)
    if rule != "positions" or len(site.shape) < 2:
        return 1
    return math.prod(site.shape[:-1] if site.channels_last else site.shape[1:])


def needs_axes(rule: Rule) -> bool:
    """Whether the rule has to know which dimension holds the features."""
    return not callable(rule) and rule != "flatten"


def check_rule(rule: Rule) -> None:
    """Raise unless this is one of the rules, or a function."""
    if not callable(rule) and rule not in RULES:
        raise ValueError(f"no row rule {rule!r}: there are {', '.join(RULES)}, or a function")


def _by_function(activation: Tensor, rule: Callable[[Tensor], Tensor], *, site: Site, inputs: int) -> Tensor:
    rows = rule(activation)
    if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != inputs:
        got = _shape(rows) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(
            f"the row rule must return ({inputs} inputs, features); at site {site.label!r} it made {got} "
            f"of {_shape(activation)}"
        )
    return _wide_enough(rows)


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
    if empty and rule != "positions":
        raise ValueError(f"site {site.label!r}: input {empty[0]} of the batch has no token but padding")
    return None if bool(keep.all()) else keep


def _mean(activation: Tensor, site: Site, keep: Tensor | None) -> Tensor:
    # Half precision is widened inside the sum: a mean over many pixels would lose digits in it.
    wide = torch.float64 if activation.dtype == torch.float64 else torch.float32
    space = tuple(range(1, activation.ndim - 1)) if site.channels_last else tuple(range(2, activation.ndim))
    if keep is None:
        return activation.mean(space, dtype=wide)
    keep = keep.to(activation.device)
    dropped = ~keep.unsqueeze(2 if site.channels_last else 1)
    # masked_fill and not a product with the mask: padding may hold NaN.
    total = activation.masked_fill(dropped, 0).sum(space, dtype=wide)
    return total / keep.sum(1, keepdim=True)


def _positions(activation: Tensor, site: Site, keep: Tensor | None) -> Tensor:
    ordered = activation if site.channels_last else activation.movedim(1, -1)
    rows = ordered.reshape(-1, ordered.shape[-1])
    if keep is not None:
        # Looked up where the mask is, mostly on the CPU: on the GPU it would wait for the forward.
        rows = rows[keep.flatten().nonzero().flatten().to(rows.device)]
    return _wide_enough(rows)


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
