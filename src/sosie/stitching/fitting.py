"""Stitching two networks at one site each: the lower part of A, an affine layer, the upper part of B.

`stitch` fits or trains the layer (Csiszárik et al. 2021) and returns a `Stitch`, which evaluates the stitched network
and can be saved and loaded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..capture import Batches, Site, as_found, labels_of, watch
from ..capture.batches import CallArguments
from ..checks import one_of, parse_call
from ..data import open_data
from ..engine.provenance import digest_of
from ..files import DamagedFile, check_schema, read_tensors, write_tensors
from ..linalg import Affine, Fit, find_fit
from ..progress import Progress
from .cuts import Cut, CutModel, answer_of, is_mask
from .joint import (
    PRECISIONS,
    Form,
    Joint,
    Pair,
    Precision,
    Resize,
    Stitched,
    chunk_size,
    chunks_of,
    in_chunks,
    look_into,
    read_inputs,
    refuse_padding,
    sums_of_pairs,
)
from .task_loss import NAME, History, JointTrainer, TaskLoss, UserLoss

Way = str | Fit | TaskLoss

CONFIDENCE = 0.95
PROPORTIONS = ("accuracy", "agreement_b", "agreement_a")


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

    The layer is fitted to the activations of both networks on `data`, in one pass and exactly, whatever the batch size:
    `fit` is least_squares, ridge(strength=…), procrustes, reduced_rank(k=…), permutation, lasso(alpha=…) or identity.
    Or it is trained with both networks frozen: task_loss, with the options of `TaskLoss`. A list of fits gives a list
    of results from one pass, with all task losses trained together. The layer acts on channels: every pixel or token of
    a map is a row. Where the sites differ in shape, A's activation is first brought into the shape of B's, see `resize`
    and sosie.stitching.joint. A cut that something goes around, such as a skip connection, is refused.

    For task_loss: `loss(outputs, batch)` replaces its targets; it is called once for every joint, with the stitched
    network's answers to one batch of the data and that batch on B's device, and returns their mean loss as a tensor.
    `validation`: data for early stopping; of the layers after each epoch, the one with the lowest loss on them is kept.
    These data and the training data are held in memory.

    `precision` is that of the products of activations; sums are in float64. float32 gives fitted values to about 1e-4
    of the exact ones, and directions of A with less than 1e-6 of the largest are left out; float64 equals a least
    squares solver on all rows.

    `result.model(x)` is the stitched network, `result.evaluate(data)` says how well it does, and `result.caveats` what
    else to know: random weights, inputs of a batch that are mixed.
    """
    one_of(precision, "precision", PRECISIONS)
    each = [fit] if isinstance(fit, (str, Fit, TaskLoss)) else fit
    if not isinstance(each, Sequence) or not each:
        raise ValueError(f"fit must be a text or a list of at least one, got {fit!r}")
    ways = list(map(find_way, each))
    tasks = [way for way in ways if isinstance(way, TaskLoss)]
    check_options(tasks, validation, loss)
    kept = None
    if tasks:
        kept = read_inputs(data, max_rows)  # training goes through them many times
        data, max_rows = in_chunks(kept), None
    first, data = look_into(data)
    lower = CutModel.of(model_a, prepare=prepare_a, inputs=inputs).cut_at(site_a, first)
    upper = CutModel.of(model_b, prepare=prepare_b, inputs=inputs).cut_at(site_b, first)
    args, kwargs = upper.call(first)
    upper.cut.check(*args, **kwargs)
    forms = [Form.of(model.cut.site.shape, model.cut.site.channels_last) for model in (lower, upper)]
    joint = Joint(forms[0], forms[1], resize)
    sites = [lower.cut.site], [upper.cut.site]
    caveats = _caveats((lower, upper), first)
    sums = sums_of_pairs((lower, upper), sites, {(0, 0): joint}, data, precision, max_rows)
    moments = sums[0, 0].joint(0, 0)
    trained: list[History] = []
    if tasks:
        held_out = None if validation is None else read_inputs(validation, None)
        trained = JointTrainer(lower, upper, joint, moments, kept, held_out, loss).train(tasks)
    results = []
    for way in ways:
        if isinstance(way, TaskLoss):
            history = trained.pop(0)
            affine, lines = history.affine, history.lines
        else:
            affine, lines = way(moments), []
        model = Stitched(lower, filled(Joint(forms[0], forms[1], resize), affine, upper.model), upper)
        results.append(Stitch(model, way.name, dict(affine.report), moments.n, lines, caveats))
    return results if each is fit else results[0]


def find_way(text: Way) -> Fit | TaskLoss:
    """A closed form, or training, by name and options."""
    if not isinstance(text, str):
        if not isinstance(text, (Fit, TaskLoss)):
            raise TypeError(f"a fit is named by a text like 'least_squares' or 'task_loss(seed=1)', got {text!r}")
        return text
    name, options = parse_call(text)
    if name != NAME:
        return find_fit(text, also=(NAME,))
    known = [f.name for f in fields(TaskLoss)]
    if unknown := [key for key in options if key not in known]:
        raise ValueError(f"{NAME} has no option {unknown[0]!r}; it has {', '.join(known)}")
    return TaskLoss(**options)


def _caveats(models: tuple[CutModel, CutModel], batch: Any) -> tuple[str, ...]:
    """What must be known of the two networks to read how well they do once stitched."""
    random = [f"{model.name} has {model.weights}" for model in models if model.weights.startswith("random weights")]
    mixing = [text for model in models if (text := model.mixing_at([model.cut.site], batch))]
    return tuple(dict.fromkeys([*random, *mixing]))


def check_options(tasks: list[TaskLoss], validation: Any, loss: UserLoss | None) -> None:
    if not tasks and (validation is not None or loss is not None):
        raise ValueError("validation= and loss= are for fit='task_loss': closed forms are not trained")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function loss(outputs, batch), got {type(loss).__name__}")
    if loss is not None and any(task.targets != "soft" for task in tasks):
        raise ValueError("loss= replaces the targets: leave targets out")


@torch.no_grad()
def filled(joint: Joint, affine: Affine, like: nn.Module) -> Joint:
    """The joint with these numbers, in the precision and on the device of the network above it."""
    first = next(like.parameters(), affine.weight)
    joint.to(first.device, first.dtype)
    joint.weight.copy_(affine.weight)
    if joint.bias is not None:
        joint.bias.copy_(affine.bias)
    return joint


@dataclass(frozen=True)
class Stitch:
    """A stitched network, and how its joint was fitted or trained."""

    model: Stitched
    fit: str
    report: dict[str, Any]
    n: int  # rows that the fit rests on
    history: list[dict[str, float]] = field(default_factory=list)  # of training: the start, each epoch
    caveats: tuple[str, ...] = ()  # about the two networks; a file does not hold them

    def __repr__(self) -> str:
        """Which two networks, where and how; their modules would fill a screen."""
        a, b = self.model.lower, self.model.upper
        ends = f"{a.name} up to {a.cut.site.label!r}, {b.name} from {b.cut.site.label!r} on"
        return f"Stitch({ends}, fit={self.fit!r}, n={self.n})"

    def evaluate(self, data: Any, *, max_rows: int | None = None) -> dict[str, float]:
        """How well B does its job with A's representation, on data that should not be those of the fit.

        agreement_a, agreement_b: share of inputs that get the same answer as from A, or from B. cross_entropy: to B's
        soft answers, in nats. With labels also accuracy, accuracy_a, accuracy_b, and relative_accuracy, which is the
        accuracy divided by B's (left out where B gets nothing right).
        """
        a, b = self.model.lower, self.model.upper
        tallies = evaluate_joints((a, b), [a.cut.site], {(0, 0): self.model.joint}, [b.cut], data, max_rows)
        return {**tallies[0, 0].numbers(), "n": float(tallies[0, 0].n)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the joint, and how it was made, as safetensors that `Stitch.load` reads; the models are not in it."""
        joint = self.model.joint
        about = {
            "fit": self.fit,
            "n": self.n,
            "report": self.report,
            "history": self.history,
            "resize": joint.resize,
            "a": _describe(self.model.lower, joint.source),
            "b": _describe(self.model.upper, joint.target),
        }
        text = json.dumps(_finite(about), allow_nan=False)
        return write_tensors(path, KIND, VERSION, dict(joint.named_parameters()), {"about": text})

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

        Models with other weights are refused. `prepare_a`, `prepare_b` and `inputs` are functions, which a file cannot
        hold: pass those that `stitch` got. `example`: a batch of data to try the cuts on; needed only where the models
        take more than tensors, else numbers of the right shape are made up.
        """
        about, joint, examples = _read(Path(path))
        batch = None
        if example is not None:
            batch = next(iter(Batches(open_data(example) if isinstance(example, str) else example)))
        models = []
        for side, given, prepare, form in zip(
            "ab", (model_a, model_b), (prepare_a, prepare_b), (joint.source, joint.target), strict=True
        ):
            model = CutModel.of(given, prepare=prepare, inputs=inputs)
            _cut_as_saved(model, about[side], side, batch, examples[side])
            now = Form.of(model.cut.site.shape, model.cut.site.channels_last)
            if now != form:
                raise ValueError(
                    f"at {model.cut.site.label!r} model {side.upper()} has {now}, but the joint was made for {form}"
                )
            models.append(model)
        like = next(models[1].model.parameters(), joint.weight)
        joint.to(like.device, like.dtype)
        stitched = Stitched(models[0], joint, models[1])
        return Stitch(stitched, about["fit"], about["report"], about["n"], about["history"])


# Evaluation: what stitched networks answer, against A, B and the labels


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
        guess, guess_b = stitched.argmax(1), b.argmax(1)
        guess_a = a.argmax(1) if a.shape == stitched.shape else None
        cross_entropy = F.cross_entropy(stitched, b.softmax(1), reduction="none")
        counts = {"cross_entropy": cross_entropy, "cross_entropy²": cross_entropy.square()}
        counts["agreement_b"] = guess == guess_b
        if guess_a is not None:
            counts["agreement_a"] = guess == guess_a
        if labels is not None:
            labels = labels.cpu()
            if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < stitched.shape[1]:
                raise ValueError(
                    f"the labels go from {int(labels.min())} to {int(labels.max())}, but B answers {stitched.shape[1]} "
                    "classes: give data without labels where theirs are others"
                )
            right, right_b = guess == labels, guess_b == labels
            counts |= {"accuracy": right, "accuracy_b": right_b, "both_right": right & right_b}
            if guess_a is not None:
                counts["accuracy_a"] = guess_a == labels
        self.n += len(stitched)
        for key, values in counts.items():
            self.sums[key] = self.sums.get(key, 0.0) + float(values.sum())

    def numbers(self) -> dict[str, float]:
        """Means over inputs, and the accuracy relative to B's (not where B gets nothing right)."""
        means = {key: value / self.n for key, value in self.sums.items() if key not in ("cross_entropy²", "both_right")}
        if means.get("accuracy_b"):
            means["relative_accuracy"] = means["accuracy"] / means["accuracy_b"]
        return means

    def interval(self, key: str) -> tuple[float, float] | None:
        """The 95 % interval of a number, for inputs that are a sample; None for an unknown number or a single input.

        Proportions have Wilson's score interval; the others the error of a mean, with Student's t. relative_accuracy
        is a ratio of two means over the same inputs, so its error is that of the mean of s − r b (the delta method).
        """
        from scipy.special import stdtrit

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
        error = math.sqrt(max(squares, 0.0) / (self.n * (self.n - 1))) / share  # squares < 0 by rounding
        reach = float(stdtrit(self.n - 1, (1 + CONFIDENCE) / 2)) * error
        return max(value - reach, 0.0), value + reach


def wilson(share: float, n: int) -> tuple[float, float]:
    """The score interval of a proportion (Wilson 1927), which also holds close to 0 and 1."""
    from scipy.special import ndtri

    z = float(ndtri((1 + CONFIDENCE) / 2))
    centre, reach = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max((centre - reach) / (1 + z**2 / n), 0.0), min((centre + reach) / (1 + z**2 / n), 1.0)


def evaluate_joints(
    models: tuple[CutModel, CutModel],
    sites_a: Sequence[Site],
    joints: Mapping[Pair, Joint],
    cuts: Sequence[Cut],
    data: Any,
    max_rows: int | None,
) -> dict[Pair, Tally]:
    """How each stitched network does. A and B run once, and for each joint only B's part above it. `cuts`: of B."""
    a, b = models
    tallies = {pair: Tally() for pair in joints}
    many = f"{len(joints)} stitched networks" if len(joints) > 1 else "the stitched network"
    with (
        as_found([a.model, b.model]),
        watch(a.model, [site.label for site in sites_a]) as seen,
        Progress(f"evaluating {many}", None, "inputs") as bar,
    ):
        for chunk in chunks_of(data, max_rows, chunk_size(*sites_a, *(cut.site for cut in cuts))):
            output, activations, masks = a.run(chunk.batch, seen, sites_a)
            answer_a, answer_b, labels = answer_of(output), b.answer(chunk.batch), labels_of(chunk.batch)
            call = b.call(chunk.batch) if any(cut.needs_input for cut in cuts) else ((), {})
            for (i, j), tally in tallies.items():
                joint, cut = joints[i, j], cuts[j]
                refuse_padding(joint, masks[i])
                args, kwargs = call if cut.needs_input else ((), {})
                output = cut.task(joint(activations[i].to(joint.weight)), *args, **kwargs)
                tally.add(answer_of(output), answer_a, answer_b, labels)
            bar.advance(chunk.count)
    return tallies


# A stitch in a file: the joint's numbers as safetensors, the rest as JSON in the metadata

KIND, VERSION = "stitch", 2
MADE_UP = 2  # inputs of an example that stands in for data
WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EXAMPLES = (*WEIGHTS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_TENSOR = {"shape": [int], "dtype": str, "mask": bool}
_NUMBERS = {str: (float, bool, str, None)}
_SIDE = {
    "name": str,
    "site": str,
    "form": {"channels": int, "space": [int], "tokens": bool},
    "digest": str,
    "prepared": (str, None),
    "example": ({"args": [_TENSOR], "kwargs": {str: _TENSOR}}, None),
}
_SCHEMA = {"fit": str, "n": int, "report": _NUMBERS, "history": [_NUMBERS], "resize": str, "a": _SIDE, "b": _SIDE}


def _describe(model: CutModel, form: Form) -> dict[str, Any]:
    def tensor(name: str, value: Tensor) -> dict[str, Any]:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape[1:]), "dtype": dtype, "mask": is_mask(name, value)}

    call = model.cut.example
    positional = [*zip((*call.names, *[""] * len(call.args)), call.args, strict=False)]
    example = None  # where the model is called with more than tensors
    if all(isinstance(value, Tensor) for _, value in (*positional, *call.kwargs.items())):
        example = {
            "args": [tensor(name, value) for name, value in positional],
            "kwargs": {name: tensor(name, value) for name, value in call.kwargs.items()},
        }
    return {
        "name": model.name,
        "site": model.cut.site.label,
        "form": asdict(form),
        "digest": digest_of(model.model.state_dict()),
        "prepared": None if model.prepare is None else repr(model.prepare).partition(" at 0x")[0],
        "example": example,
    }


def _finite(value: Any) -> Any:
    """The same values with None for numbers that are not finite, which diverging training reports and JSON lacks."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(path: Path) -> tuple[dict[str, Any], Joint, dict[str, Any]]:
    """The record of a file, its joint, and by side an example of the model's arguments, or None."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    text, tensors = read_tensors(path, KIND, VERSION)
    try:
        about = json.loads(text["about"])
    except (KeyError, ValueError, RecursionError) as error:  # ValueError: no JSON, or a number without end
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error
    check_schema(path, about, _SCHEMA)
    try:
        if not 2 <= about["n"] < 2**63:
            raise ValueError(f"a fit cannot rest on {str(about['n'])[:20]} rows")
        forms = [Form(**{**about[side]["form"], "space": tuple(about[side]["form"]["space"])}) for side in "ab"]
        # Before the joint is made, which allocates what the forms say.
        for form in forms:
            if min(form.channels, *form.space, 1) < 1 or form.channels > 2**20:
                raise ValueError(f"an activation cannot have {form.channels} channels at {form.space} positions")
        shapes = {"weight": (forms[1].channels, forms[0].channels), "bias": (forms[1].channels,)}
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shapes.get(name):
                raise ValueError(f"{name} is {tuple(tensor.shape)}, but a joint of these sites has {shapes}")
            if tensor.dtype not in WEIGHTS or not bool(tensor.isfinite().all()):
                raise ValueError(f"the {name} is of type {tensor.dtype}, or not finite")
        joint = Joint(forms[0], forms[1], about["resize"], bias="bias" in tensors)
        joint.to(tensors["weight"].dtype).load_state_dict(tensors)
        examples = {side: about[side]["example"] and _made_up(about[side]["example"]) for side in "ab"}
    except (KeyError, TypeError, ValueError) as error:  # no weight, a form with more entries
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return about, joint, examples


def _made_up(said: dict[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Seeded numbers between 0 and 1 in the shape of an example; tokens are 0, and nothing is masked."""
    generator = torch.Generator().manual_seed(0)

    def tensor(each: dict[str, Any]) -> Tensor:
        dtype, shape = getattr(torch, each["dtype"], None), [MADE_UP, *each["shape"]]
        if dtype not in EXAMPLES or min(shape) < 1 or math.prod(shape) > 2**30:
            raise ValueError(f"an input cannot be {each['dtype']!r} of shape {shape}")
        if each["mask"]:
            return torch.ones(shape, dtype=dtype)
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype)
        return torch.rand(shape, generator=generator).to(dtype)

    return tuple(tensor(each) for each in said["args"]), {key: tensor(each) for key, each in said["kwargs"].items()}


def _cut_as_saved(model: CutModel, said: dict[str, Any], side: str, batch: Any, example: Any) -> None:
    """Cut a model at the site in the file, if it is the model that was stitched; `batch` or `example` to try it on."""
    if digest_of(model.model.state_dict()) != said["digest"]:
        raise ValueError(
            f"model {side.upper()} is not the one that was stitched ({said['name']}): its weights differ, so the joint "
            "does not belong to it"
        )
    if (model.prepare is None) != (said["prepared"] is None):
        was = f"was prepared by {said['prepared']}: give prepare_{side}=" if said["prepared"] else "was not prepared"
        raise ValueError(f"when it was stitched, the input of model {side.upper()} {was}")
    if batch is not None:
        model.cut_at(said["site"], batch)
        return
    if example is None:
        raise ValueError(f"model {side.upper()} takes more than tensors, so give a batch of its data as example=")
    like = next(model.model.parameters(), torch.zeros(()))
    call = CallArguments(*example).map(lambda _, leaf: leaf.to(like.device))
    try:
        model.cut = Cut(model.model, said["site"], *call.args, **call.kwargs)
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(
            f"model {side.upper()} cannot be run on numbers made up in the shapes of the file, so give a batch of its "
            f"data as example=: {type(error).__name__}: {error}"
        ) from error
