"""What a model is called with: which parts of a batch, on which device; or an input made up where there are no data."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .restore import as_found, kept_attributes
from .sites import is_script, unwrap
from .structure import MASK, BadBatch, count_inputs, is_parts, is_text, rebuild, rebuild_named, tensors_in, with_tensors

_TARGETS = ("labels", "label")
_IMAGES = ("pixel_values", "x")
_NUMBERED = "argument "  # before the number of an argument without a name


@dataclass(frozen=True)
class CallArguments:
    """What a model is called with, as one structure whose tensors have names."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...] = ()  # of the forward's positional parameters

    def map(self, change: Callable[[str, Any], Any]) -> CallArguments:
        """The same arguments with `change(name, leaf)` in place of every tensor and list."""
        names = (*self.names, *[""] * len(self.args))
        args = tuple(rebuild_named(change, arg, name) for arg, name in zip(self.args, names, strict=False))
        return replace(self, args=args, kwargs=rebuild_named(change, self.kwargs))

    def leaves(self) -> list[Any]:
        """Every tensor and list, in the order of `map`."""
        return [leaf for _, leaf in self.named_leaves()]

    def named_leaves(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        self.map(lambda name, leaf: found.append((name, leaf)))
        return found

    def form(self) -> CallArguments:
        """The same with names in place of tensors and lists: equal for calls of one structure and the same options."""
        return self.map(lambda name, leaf: name)

    def count(self) -> int:
        """The number of inputs."""
        return count_inputs((self.args, self.kwargs))

    def inputs(self, start: int, stop: int) -> CallArguments:
        """The inputs from start to stop."""
        return self.map(lambda _, leaf: leaf[start:stop])


def model_arguments(
    batch: Any,
    *,
    model: nn.Module | None = None,
    inputs: Callable[[Any], Any] | None = None,
    prepare: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for a model, moved to its device.

    A tensor is the argument; of a pair the first part is; a dict gives keyword arguments, without its labels.
    Where the forward of `model` takes an `attention_mask`, a part (inputs, tokens) beside ids or embeddings is that.
    `inputs(batch)` overrides that and returns a tensor, a tuple of arguments or a dict. `prepare` (the
    model's own normalisation) is applied after the move, to the first argument, or in a dict to
    `pixel_values`, `x`, or the first floating-point tensor. Where there is text, a list of strings or a dict
    with one in it, `prepare` is the model's tokeniser: it gets all of that, and returns the arguments.
    """
    chosen = without_labels(batch) if inputs is None else inputs(batch)
    if prepare is None and inputs is None and _has_text(chosen):
        raise BadBatch("the data are texts, which a model cannot read: give its tokeniser as prepare_a= and prepare_b=")
    if prepare is not None and _has_text(chosen):
        chosen, prepare = _tokenised(chosen, prepare), None
    elif getattr(prepare, "text_only", False):
        prepare = None
    mask = _mask_beside(batch, model) if inputs is None and model is not None else None
    beside = {} if mask is None else {MASK: _moved(mask, device)}
    moved = rebuild(lambda leaf: _moved(leaf, device), with_tensors(chosen))
    if isinstance(moved, Mapping):
        keywords = dict(moved)
        if prepare is not None:
            key = _main_key(keywords)
            keywords[key] = prepare(keywords[key])
        return (), keywords
    positional = moved if isinstance(moved, tuple) else (moved,)
    if prepare is not None:
        if not positional or not isinstance(positional[0], Tensor):
            got = type(positional[0]).__name__ if positional else "nothing"
            raise BadBatch(f"prepare is applied to the model's first argument, which is {got} and no tensor")
        positional = (prepare(positional[0]), *positional[1:])
    return positional, beside


def _mask_beside(batch: Any, model: nn.Module) -> Tensor | None:
    """The padding mask among the parts of a batch (ids, mask, …), for a model that takes one; None: there is none.

    The first part may be embeddings (inputs, tokens, features), too. Labels of tokens are as large as the ids, so that
    a part which may be either is an error. A mask has 1 at tokens and 0 at the padding before or after them: labels of
    0 and 1 are in no such order.
    """
    if not is_parts(batch) or len(batch) < 2 or not isinstance(ids := with_tensors(batch[0]), Tensor):
        return None
    if ids.ndim not in (2, 3) or (ids.ndim == 2 and ids.is_floating_point()):
        return None
    parts = [part for part in map(with_tensors, batch[1:]) if isinstance(part, Tensor)]
    others = [part for part in parts if part.shape == ids.shape[:2]]
    of_scores = [part for part in parts if part.shape != ids.shape and _masks_scores(part, *ids.shape[:2])]
    if not (others or of_scores):
        return None
    if not _takes_mask(unwrap(model)):
        _check_own_mask(unwrap(model), [part for part in others if _pads(part)])
        return None
    if not others:
        raise BadBatch(
            f"{type(unwrap(model)).__name__} takes an {MASK}, and a part of the batch has shape "
            f"{tuple(of_scores[0].shape)}, as a mask of attention scores has; padding is read from (inputs, tokens), 1 "
            "at tokens: give that one"
        )
    binary = [part for part in others if bool(((part == 0) | (part == 1)).all())]
    if len(binary) == 1 and _pads(binary[0]):
        return binary[0]
    if len(binary) == 1:
        fit = "one has nothing but 0 and 1 in it, but zeros among its ones, as labels of tokens have"
    else:
        fit = f"{len(binary) or 'none'} {'have' if binary else 'has'} nothing but 0 and 1 in it, as a mask has"
    raise BadBatch(
        f"{type(unwrap(model)).__name__} takes an {MASK}, and {len(others)} of the parts of a batch beside the ids may "
        f"be it by their shape, {tuple(ids.shape[:2])}; {fit}. Give dicts: "
        f"{{'input_ids': …, {MASK!r}: …}}, and 'labels' where there are any"
    )


def _pads(part: Tensor) -> bool:
    """Whether every row is 1 at tokens and 0 at the padding before or after them."""
    ones = part == 1
    return bool(((part == 0) | ones).all()) and bool(((ones[:, 1:] != ones[:, :-1]).sum(1) <= 1).all())


def _check_own_mask(model: nn.Module, masks: Sequence[Tensor]) -> None:
    """Raise if a forward takes a mask by another name and a part of the batch may be it: it would not be passed on."""
    own = [] if is_script(model) else [name for name in inspect.signature(model.forward).parameters if _is_mask(name)]
    if own and any(not bool(mask.all()) for mask in masks):
        raise BadBatch(
            f"the forward of {type(model).__name__} takes {own[0]!r}, and a part of the batch, with 1 and then 0 or "
            "0 and then 1 in every row, may be that or labels: give dicts that name the arguments and 'labels'"
        )


def _is_mask(name: str) -> bool:
    return name == "mask" or name.endswith("_mask")


def named_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; positional ones by those of the forward's parameters, or by their number."""
    own = [] if is_script(unwrap(model)) else inspect.signature(unwrap(model).forward).parameters.values()
    names = [each.name for each in own if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    names += [f"{_NUMBERED}{k + 1}" for k in range(len(names), len(args))]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def unread_mask(model: nn.Module, named: Mapping[str, Any]) -> tuple[str, int] | None:
    """An argument that may tell padding but is not called `attention_mask`, and its number of tokens; None without one.

    Whether such a mask has 1 at tokens or at padding cannot be known.
    """
    for name, part in named.items():
        if not isinstance(part, Tensor) or part.ndim != 2 or not (_is_mask(name) or name.startswith(_NUMBERED)):
            continue
        mixed = bool(((part == 0) | (part == 1)).all()) and bool((part != part[:1, :1]).any())
        if mixed and (_is_mask(name) or any(map(_has_mask, unwrap(model).modules()))):
            return name, part.shape[1]
    return None


def _takes_mask(model: nn.Module) -> bool:
    """Whether a forward has an `attention_mask`, or hands all keywords on to a module whose forward has."""
    if is_script(model):
        return False
    parameters = inspect.signature(model.forward).parameters
    if MASK in parameters or all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
        return MASK in parameters
    return any(_has_mask(module) for module in model.modules() if module is not model)


def _has_mask(module: nn.Module) -> bool:
    return not is_script(module) and MASK in inspect.signature(module.forward).parameters


def _masks_scores(part: Tensor, inputs: int, tokens: int) -> bool:
    """Whether the shape is (inputs, 1, tokens), (inputs, 1, 1, tokens), or with tokens for a 1."""
    return (
        part.ndim in (3, 4)
        and part.shape[-1] == tokens
        and len(part) == inputs
        and set(part.shape[1:-1]) <= {1, tokens}
    )


def _has_text(chosen: Any) -> bool:
    """Whether a model's arguments are texts that have yet to be tokenised."""
    return is_text(chosen) or (isinstance(chosen, Mapping) and any(map(is_text, chosen.values())))


def _tokenised(texts: Any, prepare: Callable[[Any], Any]) -> Any:
    found = prepare(texts)
    parts = found.values() if isinstance(found, Mapping) else [found]
    if not any(isinstance(part, (Tensor, np.ndarray)) for part in with_tensors(list(parts))):
        raise BadBatch(
            f"of text, prepare must make tensors, but it made {type(found).__name__} without one: have the tokeniser "
            'pad them to one length and return tensors, e.g. tokeniser(texts, padding=True, return_tensors="pt")'
        )
    return found


def labels_of(batch: Any) -> Tensor | None:
    """The class numbers (inputs,) of a batch: the second of a pair, or a dict's `labels`; None if there are none.

    Of ids, a mask as large as they are, and labels, the third.
    """
    parts: Any = batch if is_parts(batch) and batch else (batch,)
    labels = parts[1] if len(parts) > 1 else parts[0]
    if len(parts) == 3:
        shapes = [tuple(each.shape) for each in parts[:2] if isinstance(each, (Tensor, np.ndarray))]
        labels = parts[2] if len(shapes) == 2 and shapes[0] == shapes[1] and len(shapes[0]) == 2 else labels
    if isinstance(labels, Mapping):
        labels = next((labels[key] for key in _TARGETS if key in labels), None)
    elif len(parts) == 1:
        return None
    labels = with_tensors(labels)
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        return None
    return labels


def without_labels(batch: Any) -> Any:
    """What of a batch a model is given: the first of a pair, a dict without its labels."""
    if is_parts(batch):
        if not batch:
            raise BadBatch("an empty tuple as batch: there is nothing to give to the model")
        batch = batch[0]
    if isinstance(batch, Mapping):
        return {key: part for key, part in batch.items() if key not in _TARGETS}
    return batch


def _moved(leaf: Any, device: str | torch.device | None) -> Any:
    """A copy on the device: a model or its `prepare` may work in place, and the next model gets the same batch."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(device or leaf.device, non_blocking=True, copy=True)


def _main_key(keywords: dict[str, Any]) -> str:
    floating = (key for key, part in keywords.items() if isinstance(part, Tensor) and part.is_floating_point())
    named = (key for key in _IMAGES if isinstance(keywords.get(key), Tensor))
    key = next(named, None) or next(floating, None)
    if key is None:
        raise BadBatch(f"prepare found no floating-point tensor among {', '.join(keywords) or 'no arguments'}")
    return key


# An input for a model that came without data, to see how its forward goes

SIDES = {1: (16, 64, 256, 1024), 2: (32, 28, 64, 96, 128, 224, 256), 3: (8, 16, 32)}  # tried in turn, by axes of space
TOKENS = 8
BATCH = 2


def example_input(model: nn.Module, input_shape: Sequence[int] | None = None, *, seed: int = 0) -> Tensor:
    """Two random inputs of this shape (without the batch axis), or of one that the model's first layer takes.

    A first convolution gives the channels; of the usual sizes, the first with which the forward runs is taken.
    """
    generator = torch.Generator().manual_seed(seed)
    like = next(iter(model.parameters()), None)
    if like is None:
        raise ValueError("the model has no weights")
    if input_shape is not None:
        return torch.randn(BATCH, *input_shape, generator=generator).to(like)
    first = next((m for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding, _ConvNd))), None)
    if isinstance(first, nn.Embedding):
        return torch.randint(first.num_embeddings, (BATCH, TOKENS), generator=generator).to(like.device)
    if first is None:
        raise ValueError("the model's first layer does not show which inputs it takes: give input_shape=")
    shapes = shapes_for(first) if isinstance(first, _ConvNd) else [(first.in_features,)]
    failure: Exception | None = None
    for shape in shapes:
        example = torch.randn(BATCH, *shape, generator=generator).to(like)
        try:
            with kept_attributes(model), as_found(model):
                model(example)
            return example
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # whatever a forward says of a wrong shape
            failure = error
    tried = ", ".join(map(str, shapes))
    raise ValueError(f"the forward ran for no input of shape {tried}: give input_shape=; the last error: {failure}")


def shapes_for(first: _ConvNd) -> list[tuple[int, ...]]:
    """Shapes of one input that a first convolution takes, the likeliest first."""
    axes = first.weight.ndim - 2
    sides: Sequence[int] = SIDES[axes]
    if axes == 2:
        # Grey images are mostly MNIST's, images that the first layer makes smaller mostly ImageNet's.
        best = 28 if first.in_channels == 1 else 224 if first.stride[0] > 1 else 32
        sides = sorted(sides, key=lambda side: side != best)
    return [(first.in_channels, *[side] * axes) for side in sides]


def explain_types(error: RuntimeError, model: nn.Module, given: Any, word: str) -> None:
    """Raise a clearer error where torch objects to the type of an input; otherwise return, to raise the original."""
    own = types_of(model)
    whole = "long" in str(error).lower()  # else ids, which are whole numbers, are not what it objects to
    floating = [x for x in tensors_in(given) if whole or x.is_floating_point()]
    odd = sorted({_type_name(x.dtype) for x in floating if x.dtype not in own})
    if own and odd and "type" in str(error):
        here = sorted(map(_type_name, own))
        raise ValueError(
            f"{word} of {' and '.join(odd)} for a model of {' and '.join(here)}: bring them to one type, with "
            f"{word}.to(torch.{here[0]}) for instance"
        ) from error


def types_of(model: nn.Module) -> set[torch.dtype]:
    """Of its floating point numbers."""
    return {t.dtype for t in itertools.chain(model.parameters(), model.buffers()) if t.is_floating_point()}


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
