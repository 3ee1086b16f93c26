"""Stitching: the lower part of one network, an affine layer, the upper part of another (Csiszárik et al. 2021)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..capture import Batches, as_found, labels_of
from ..capture.arguments import CallArguments
from ..data import open_data
from ..engine.provenance import digest_of
from ..files import DamagedFile, read_tensors, write_tensors
from ..linalg import Affine, Fit
from ..progress import Progress
from .cuts import Cut, is_mask
from .halves import (
    CutModel,
    Precision,
    Stitched,
    check_precision,
    chunks_of,
    look_into,
    open_half,
    open_network,
    sums_at_joint,
)
from .joint import Form, Joint, Resize
from .task_loss import TaskLoss, UserLoss, find_ways, in_chunks, read_inputs
from .training import JointTrainer, Trained

# Counts over what a stitched network answers, and how sure they are

CONFIDENCE = 0.95
PROPORTIONS = ("accuracy", "agreement_b", "agreement_a")


@dataclass
class Tally:
    """Sums over inputs: the stitched network's answers against A's, B's and the labels."""

    n: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, stitched: Tensor, a: Tensor, b: Tensor, labels: Tensor | None) -> None:
        stitched, a, b = (answer.detach().double().cpu() for answer in (stitched, a, b))
        if stitched.ndim != 2 or b.shape != stitched.shape:
            raise ValueError(f"stitched networks are evaluated on (inputs, classes), got {tuple(stitched.shape)}")
        for answers, whose in ((stitched, "the stitched network"), (a, "A"), (b, "B")):
            if bad := int(answers.isnan().flatten(1).any(1).sum()):
                raise ValueError(f"{whose} answers {bad} of {len(answers)} inputs with NaN, which agrees with nothing")
        self.n += len(stitched)
        guess, guess_b = stitched.argmax(1), b.argmax(1)
        lost = F.cross_entropy(stitched, b.softmax(1), reduction="none")
        self._count("cross_entropy", lost)
        self._count("cross_entropy²", lost.square())
        self._count("agreement_b", guess == guess_b)
        if a.shape == stitched.shape:
            self._count("agreement_a", guess == a.argmax(1))
        if labels is not None:
            labels = labels.cpu()
            if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < stitched.shape[1]:
                raise ValueError(
                    f"the labels go from {int(labels.min())} to {int(labels.max())}, but B answers {stitched.shape[1]} "
                    "classes: give data without labels where theirs are others"
                )
            self._count("accuracy", guess == labels)
            self._count("accuracy_b", guess_b == labels)
            self._count("both_right", (guess == labels) & (guess_b == labels))
            if a.shape == stitched.shape:
                self._count("accuracy_a", a.argmax(1) == labels)

    def _count(self, key: str, values: Tensor) -> None:
        self.sums[key] = self.sums.get(key, 0.0) + float(values.sum())

    def numbers(self) -> dict[str, float]:
        """Means over inputs, and relative_accuracy, which is the accuracy over B's (not where B gets nothing right)."""
        found = {key: value / self.n for key, value in self.sums.items() if key not in ("cross_entropy²", "both_right")}
        if found.get("accuracy_b"):
            found["relative_accuracy"] = found["accuracy"] / found["accuracy_b"]
        return found

    def interval(self, key: str) -> tuple[float, float] | None:
        """The 95 % interval of a number, if the inputs are a sample; None where it is not known, or of one input.

        Proportions have Wilson's score interval; the others the error of a mean, with Student's t. relative_accuracy
        is a ratio of two means over the same inputs, so its error is that of the mean of s − r b (the delta method).
        """
        value = self.numbers().get(key)
        if value is None or self.n < 2:
            return None
        if key in PROPORTIONS:
            return wilson(value, self.n)
        if key == "relative_accuracy":
            right, right_b, both = (self.sums[name] for name in ("accuracy", "accuracy_b", "both_right"))
            squares, share = right - 2 * value * both + value**2 * right_b, right_b / self.n
        else:
            squares, share = self.sums["cross_entropy²"] - self.n * value**2, 1.0
        reach = _quantile(self.n) * math.sqrt(max(squares, 0.0) / (self.n * (self.n - 1))) / share  # < 0 by rounding
        return max(value - reach, 0.0), value + reach


def wilson(share: float, n: int) -> tuple[float, float]:
    """The score interval of a proportion (Wilson 1927): right for shares close to 0 and 1, too."""
    from scipy.special import ndtri

    z = float(ndtri((1 + CONFIDENCE) / 2))
    centre, reach = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max((centre - reach) / (1 + z**2 / n), 0.0), min((centre + reach) / (1 + z**2 / n), 1.0)


def _quantile(n: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))


# How well B does its job with A's representation


@dataclass(frozen=True)
class Stitch:
    """A stitched network, and how its joint was found."""

    model: Stitched
    fit: str
    report: dict[str, Any]
    n: int  # rows that the fit rests on
    history: list[dict[str, float]] = field(default_factory=list)  # of training: the start, each epoch

    def __repr__(self) -> str:
        """Which two networks, where and how: without their modules, which fill a screen."""
        a, b = self.model.lower, self.model.upper
        ends = f"{a.name} up to {a.cut.site.label!r}, {b.name} from {b.cut.site.label!r} on"
        return f"Stitch({ends}, fit={self.fit!r}, n={self.n})"

    def evaluate(self, data: Any, *, max_rows: int | None = None) -> dict[str, float]:
        """How well B does its job with A's representation, on data that should not be those of the fit.

        agreement_a, agreement_b: share of inputs that get the same answer as from A, from B. cross_entropy: to B's
        soft answers, in nats. With labels also accuracy, accuracy_a, accuracy_b, and relative_accuracy, which is the
        accuracy over B's (left out where B gets nothing right).
        """
        halves = self.model.lower, self.model.upper
        tally = Tally()
        with as_found(self.model), Progress("evaluating the stitched network", None, "inputs") as bar:
            for chunk in chunks_of(data, max_rows):
                a, b = (half.answer(chunk.batch) for half in halves)
                tally.add(self.model(chunk.batch), a, b, labels_of(chunk.batch))
                bar.advance(chunk.count)
        return {**tally.numbers(), "n": float(tally.n)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the joint, and how it was found, as safetensors that `Stitch.load` reads; the models are not in it."""

        return save_stitch(self, path)

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        model_a: Any,
        model_b: Any,
        *,
        example: Any = None,
        prepare_a: Callable[[Any], Any] | None = None,
        prepare_b: Callable[[Any], Any] | None = None,
        inputs: Callable[[Any], Any] | None = None,
    ) -> Stitch:
        """The stitched network that `save` wrote, of the same two models (modules or specifications).

        Models whose weights are others than those it was saved with are refused. `prepare_a`, `prepare_b` and `inputs`
        are functions, which no file holds: give those that `stitch` was given. `example`: a batch of data to try the
        cuts on; needed only where the models take more than tensors, else numbers of the right shape are made up.
        """

        return load_stitch(path, model_a, model_b, example, prepare_a, prepare_b, inputs)


Way = str | Fit | TaskLoss


def stitch(
    model_a: Any,
    site_a: str,
    model_b: Any,
    site_b: str,
    data: Any,
    *,
    fit: Way | Sequence[Way] = "least_squares",
    validation: Any = None,
    loss: UserLoss | None = None,
    precision: Precision = "float32",
    resize: Resize = "interpolate",
    prepare_a: Callable[[Any], Any] | None = None,
    prepare_b: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    max_rows: int | None = None,
) -> Stitch | list[Stitch]:
    """Can B do its job with A's representation? Join A up to `site_a` to B from `site_b` on, by an affine layer.

    The layer is found from the activations of both networks on `data`, in one pass and exactly, whatever the batch
    size: `fit` is least_squares, ridge(strength=…), procrustes, reduced_rank(k=…), permutation, lasso(alpha=…) or
    identity. Or it is trained with both networks frozen: task_loss, with the options of `TaskLoss`. A list of fits
    gives a list of results from one pass, all task losses trained together. The layer acts on channels: every pixel or
    token of a map is a row. Where the sites differ in shape, A's activation is brought into B's first, see `resize` and
    sosie.stitching.joint. A cut that something goes around, a skip connection say, is refused.

    For task_loss: `loss(outputs, batch)` replaces its targets; it gets the stitched network's answers to one batch of
    the data, and that batch on B's device, once for every joint, and returns their mean loss as a tensor. `validation`:
    data for early stopping; of the layers after each epoch, the one that loses least on them is kept. Such data are
    held in memory.

    `precision` is that in which activations are multiplied; sums are in float64. float32 gives fitted values to about
    1e-4 of the exact ones, and directions of A with less than 1e-6 of the largest count as none; float64 equals a least
    squares solver on all rows.

    `result.model(x)` is the stitched network; `result.evaluate(data)` says how well it does.
    """
    check_precision(precision)
    ways = find_ways(fit)
    tasks = [way for way in ways if isinstance(way, TaskLoss)]
    check_options(tasks, validation, loss)
    if tasks:  # read once: they are gone through many times
        kept = read_inputs(data, max_rows)
        data, max_rows = in_chunks(kept), None
    first, data = look_into(data)
    lower, upper = (
        open_half(model, site, prepare, inputs, first)
        for model, site, prepare in ((model_a, site_a, prepare_a), (model_b, site_b, prepare_b))
    )
    args, kwargs = upper.call(first)
    upper.cut.check(*args, **kwargs)
    source, target = (Form.of(half.cut.site.shape, half.cut.site.channels_last) for half in (lower, upper))
    joint = Joint(source, target, resize)
    at_joint = sums_at_joint(lower, upper, joint, data, precision, max_rows).joint(0, 0)
    trained: list[Trained] = []
    if tasks:
        held_out = None if validation is None else read_inputs(validation, None)
        trained = JointTrainer(lower, upper, joint, at_joint, kept, held_out, loss).train(tasks)
    rest = iter(trained)
    found = []
    for way in ways:
        one = next(rest) if isinstance(way, TaskLoss) else Trained(way(at_joint), [])
        own = Joint(source, target, resize)
        fill(own, one.affine, like=upper.model)
        model = Stitched(lower, own, upper)
        found.append(Stitch(model, way.name, dict(one.affine.report), at_joint.n, one.history))
    return found[0] if isinstance(fit, (str, Fit, TaskLoss)) else found


def check_options(tasks: list[TaskLoss], validation: Any, loss: UserLoss | None) -> None:
    if not tasks and (validation is not None or loss is not None):
        raise ValueError("validation= and loss= are for fit='task_loss'; closed forms are not trained")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function loss(outputs, batch), got {type(loss).__name__}")
    if loss is not None and any(task.targets != "soft" for task in tasks):
        raise ValueError("loss= replaces the targets: leave targets out")


@torch.no_grad()
def fill(joint: Joint, affine: Affine, *, like: nn.Module) -> None:
    first = next(like.parameters(), None)
    if first is not None:
        joint.to(first.device, first.dtype)
    joint.weight.copy_(affine.weight)
    assert joint.bias is not None
    joint.bias.copy_(affine.bias)


# A stitch in a file: the joint's numbers as safetensors, the rest as JSON beside them. Never unpickled

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

    def check(self, half: CutModel, side: str) -> None:
        if digest_of(half.model.state_dict()) != self.digest:
            raise ValueError(
                f"model {side.upper()} is not the one that was stitched ({self.name}): its weights differ, so the "
                "joint does not belong to it"
            )
        if (half.prepare is None) != (self.prepared is None):
            was = f"was prepared by {self.prepared}: give prepare_{side}=" if self.prepared else "was not prepared"
            raise ValueError(f"when it was stitched, the input of model {side.upper()} {was}")

    def cut(self, half: CutModel, side: str, batch: Any) -> None:
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


def _describe(half: CutModel, form: Form) -> dict[str, Any]:
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
