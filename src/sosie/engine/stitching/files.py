"""A stitch in a file: the joint's numbers as safetensors, the rest as JSON beside them. Never unpickled."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...capture import Batches, Cut
from ...capture.arguments import CallArguments
from ...capture.leaks import is_mask
from ...data import open_data
from ...models.joint import Form, Joint
from ...results import DamagedFile, read_tensors, write_tensors
from ..digest import digest_of
from .evaluating import Stitch
from .halves import Half, Stitched, open_network

KIND, VERSION = "stitch", 2
MADE_UP = 2  # inputs of an example that stands in for data
WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EXAMPLES = (*WEIGHTS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def save_stitch(stitch: Stitch, path: str | os.PathLike[str]) -> Path:
    joint = stitch.model.joint
    tensors = {"weight": joint.weight} if joint.bias is None else {"weight": joint.weight, "bias": joint.bias}
    about = {
        "fit": stitch.fit,
        "n": stitch.n,
        "report": stitch.report,
        "history": stitch.history,
        "resize": joint.resize,
        "a": _describe(stitch.model.lower, joint.source),
        "b": _describe(stitch.model.upper, joint.target),
    }
    # Training that went astray may have reported what JSON has no number for.
    return write_tensors(path, KIND, VERSION, tensors, {"about": json.dumps(_finite(about), allow_nan=False)})


def load_stitch(
    path: str | os.PathLike[str],
    model_a: Any,
    model_b: Any,
    example: Any,
    prepare_a: Callable[[Any], Any] | None,
    prepare_b: Callable[[Any], Any] | None,
    inputs: Callable[[Any], Any] | None,
) -> Stitch:
    about, tensors = _read(Path(path))
    try:
        forms = [_form(about[side]["form"]) for side in "ab"]
        joint = _joint(forms, about["resize"], tensors)
        facts = [_Facts(about[side]) for side in "ab"]
        fit, n = _typed(about["fit"], str), _typed(about["n"], int)
        report, history = _typed(about["report"], dict), [_typed(each, dict) for each in _typed(about["history"], list)]
        if not 2 <= n < 2**63:
            raise ValueError(f"no fit rests on {str(n)[:20]} rows")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error
    batch = (
        None if example is None else next(iter(Batches(open_data(example) if isinstance(example, str) else example)))
    )
    halves = []
    for side, model, prepare, known in zip("ab", (model_a, model_b), (prepare_a, prepare_b), facts, strict=True):
        half = open_network(model, prepare, inputs)
        known.check(half, side)
        known.cut(half, side, batch)
        halves.append(half)
    for half, form, side in zip(halves, forms, "AB", strict=True):
        found = Form.of(half.cut.site.shape, half.cut.site.channels_last)
        if found != form:
            raise ValueError(f"at {half.cut.site.label!r} model {side} has {found}, but the joint was made for {form}")
    like = next(halves[1].model.parameters(), None)
    if like is not None:
        joint.to(like.device, like.dtype)
    return Stitch(Stitched(halves[0], joint, halves[1]), fit, report, n, history)


class _Facts:
    """What a file says about one of the two networks."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.name, self.site = _typed(found["name"], str), _typed(found["site"], str)
        self.digest, self.prepared = _typed(found["digest"], str), found["prepared"]
        if self.prepared is not None:
            _typed(self.prepared, str)
        self.example = None if found["example"] is None else _made_up(_typed(found["example"], dict))

    def check(self, half: Half, side: str) -> None:
        if digest_of(half.model.state_dict()) != self.digest:
            raise ValueError(
                f"model {side.upper()} is not the one that was stitched ({self.name}): its weights differ, so the "
                "joint does not belong to it"
            )
        if (half.prepare is None) != (self.prepared is None):
            was = f"was prepared by {self.prepared}: give prepare_{side}=" if self.prepared else "was not prepared"
            raise ValueError(f"when it was stitched, the input of model {side.upper()} {was}")

    def cut(self, half: Half, side: str, batch: Any) -> None:
        if batch is None and self.example is None:
            raise ValueError(f"model {side.upper()} takes more than tensors, so give a batch of its data as example=")
        args, kwargs = half.call(batch) if batch is not None else self.example  # type: ignore[misc]
        first = next(half.model.parameters(), None)
        call = CallArguments(args, kwargs)
        if first is not None:
            call = call.map(lambda _, leaf: leaf.to(first.device) if isinstance(leaf, Tensor) else leaf)
        try:
            half.cut = Cut(half.model, self.site, *call.args, **call.kwargs)
        except (RuntimeError, TypeError, IndexError) as error:
            if batch is not None:
                raise
            raise ValueError(
                f"model {side.upper()} cannot be run on numbers made up in the shapes that the file tells, so give a "
                f"batch of its data as example=: {type(error).__name__}: {error}"
            ) from error


def _describe(half: Half, form: Form) -> dict[str, Any]:
    return {
        "name": half.name,
        "site": half.cut.site.label,
        "form": asdict(form),
        "digest": digest_of(half.model.state_dict()),
        "prepared": None if half.prepare is None else repr(half.prepare).partition(" at 0x")[0],
        "example": _shapes(half.cut.example),
    }


def _shapes(call: CallArguments) -> dict[str, Any] | None:
    """What a model is called with, as shapes and types; None where that is more than tensors."""
    positional = [*zip((*call.names, *[""] * len(call.args)), call.args, strict=False)]
    if not all(isinstance(value, Tensor) for _, value in (*positional, *call.kwargs.items())):
        return None
    return {
        "args": [_shape(value, name) for name, value in positional],
        "kwargs": {name: _shape(value, name) for name, value in call.kwargs.items()},
    }


def _shape(tensor: Tensor, name: str) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape[1:]), "dtype": dtype, "mask": is_mask(name, tensor)}


def _made_up(found: dict[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Seeded numbers between 0 and 1 in the shape of an example; token 0, and nothing masked."""
    generator = torch.Generator().manual_seed(0)

    def tensor(each: dict[str, Any]) -> Tensor:
        dtype = getattr(torch, _typed(each["dtype"], str), None)
        shape = [MADE_UP, *(_typed(size, int) for size in _typed(each["shape"], list))]
        if dtype not in EXAMPLES or min(shape) < 1 or math.prod(shape) > 2**30:
            raise ValueError(f"no tensor is {each['dtype']!r} of shape {shape}")
        if each["mask"]:
            return torch.ones(shape, dtype=dtype)
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype)
        return torch.rand(shape, generator=generator).to(dtype)

    return tuple(tensor(each) for each in found["args"]), {key: tensor(each) for key, each in found["kwargs"].items()}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    text, tensors = read_tensors(path, KIND, VERSION)
    try:
        return _typed(json.loads(text["about"]), dict), tensors
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # ValueError: no JSON, or a number without end
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _joint(forms: list[Form], resize: Any, tensors: dict[str, Tensor]) -> Joint:
    unknown = set(tensors) - {"weight", "bias"}
    if unknown or "weight" not in tensors:
        raise ValueError(f"a joint has a weight and mostly a bias, not {', '.join(sorted(tensors)) or 'nothing'}")
    shapes = {"weight": (forms[1].channels, forms[0].channels), "bias": (forms[1].channels,)}
    for name, found in tensors.items():
        # Before the joint is made: it allocates what the forms say.
        if tuple(found.shape) != shapes[name]:
            raise ValueError(f"the {name} is {tuple(found.shape)}, the forms of the sites make it {shapes[name]}")
        if found.dtype not in WEIGHTS or not bool(found.isfinite().all()):
            raise ValueError(f"the {name} holds what is no finite number")
    joint = Joint(forms[0], forms[1], resize, bias="bias" in tensors)
    joint.to(tensors["weight"].dtype)
    with torch.no_grad():
        for name, parameter in joint.named_parameters():
            parameter.copy_(tensors[name])
    return joint


def _form(found: dict[str, Any]) -> Form:
    space = tuple(_typed(size, int) for size in _typed(found["space"], list))
    form = Form(_typed(found["channels"], int), space, _typed(found["tokens"], bool))
    # A joint allocates its weights from these: they must be sizes, and of something that exists.
    if min(form.channels, *space, 1) < 1 or form.channels > 2**20:
        raise ValueError(f"no activation is {form}")
    return form


def _typed(found: Any, kind: type) -> Any:
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise TypeError(f"expected {kind.__name__}, got {str(found)[:60]!r}")
    return found


def _finite(found: Any) -> Any:
    if isinstance(found, dict):
        return {str(key): _finite(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
