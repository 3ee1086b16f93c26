"""Fisher information of a classifier: Task2Vec, which is its diagonal by parameter, and the Fisher–Rao norm."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ..capture import Chunk, SilentSite, nearest, unwrap, watch
from ..checks import one_of, whole_number
from ..engine.network import Network
from ..engine.outputs import Labels
from ..engine.provenance import provenance
from ..engine.stream import Stream
from ..files import DamagedFile
from ..stats import Reader, check_labels, load_statistics, row_hash, save_statistics
from .gradients import chunks_of
from .squared_gradients import SquaredGradients

AVERAGES = ("parameters", "filters")
KIND = "task2vec"
UNDER = ("labels", "expected", "drawn")
WEIGHT_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


def log_p_of(network: Network, logits: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """A classifier's logits (n, classes) and their log-probabilities, both in float64; raises at other answers."""
    shape, dtype = tuple(logits.shape), str(logits.dtype).removeprefix("torch.")
    if len(shape) != 2 or shape[0] != inputs or shape[1] < 2 or not logits.is_floating_point():
        raise ValueError(
            f"{network.name}: p(y|x) is read from logits (n, classes) with at least two classes, but {inputs} "
            f"inputs gave outputs of shape {shape} and type {dtype}"
        )
    logits = logits.detach() if logits.device.type in ("cpu", "cuda") else logits.detach().cpu()
    answers = Reader(network.name, "auto").read(logits)
    if answers.scores is None or answers.log_p is None or answers.kind != "logits":
        raise ValueError(
            f"{network.name}: the outputs are {answers.kind}, not logits: leave out the softmax at the end"
        )
    return answers.scores, answers.log_p


def drawn_labels(log_p: Tensor, start: int, *, seed: int, draw: int) -> Tensor:
    """(n,) one class per input, drawn from its own p by a hash of the input's index, whatever the batch size."""
    own = int(row_hash(np.array([draw]), seed)[0])
    hashes = row_hash(np.arange(start, start + len(log_p)), own)
    uniform = torch.from_numpy((hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53).to(log_p.device)
    shares = log_p.exp().cumsum(1)
    # Scaled by the last sum, which is not quite 1 by rounding, so that the class always has p > 0.
    return torch.searchsorted(shares, (uniform * shares[:, -1])[:, None], right=True)[:, 0]


@dataclass(frozen=True, eq=False)
class Task2Vec:
    """The diagonal of the Fisher information, tensor by tensor, as `task2vec` makes it."""

    name: str
    fisher: Mapping[str, Tensor]  # by parameter, float64, on the CPU
    n: int
    classes: int
    average: str
    labels: str  # where y came from, in words
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vector(self) -> Tensor:
        """All of it as one vector, in the model's order."""
        return torch.cat([part.flatten() for part in self.fisher.values()])

    def distance(self, other: Task2Vec, *, normalised: bool = False) -> float:
        """Cosine distance 1 − ⟨a, b⟩ / (‖a‖ ‖b‖) of the two vectors: 0 for the same direction, 1 at most.

        `normalised` divides both by a + b first, entry by entry, as Achille et al. 2019 do (their symmetric distance),
        so that parameters of large Fisher information do not outweigh the rest; entries that are 0 in both are ignored.
        """
        self._check_same_parameters(other)
        a, b = self.vector, other.vector
        if normalised:
            some = (a + b) > 0
            a, b = ((part[some] / (a + b)[some]) for part in (a, b))
        lengths = [float(part.norm()) for part in (a, b)]
        for which, length in zip((self, other), lengths, strict=True):
            if not length:
                raise ValueError(f"{which.name}: the Fisher information is 0 throughout, so it has no direction")
        # Half the squared distance of the directions is 1 − cos, without the rounding of 1 − (nearly 1).
        return float((a / lengths[0] - b / lengths[1]).square().sum() / 2)

    def _check_same_parameters(self, other: Task2Vec) -> None:
        if self.average != other.average:
            raise ValueError(f"averages differ: {self.average!r} of {self.name}, {other.average!r} of {other.name}")
        a, b = ({name: str(tuple(part.shape)) for name, part in each.fisher.items()} for each in (self, other))
        odd = [
            f"{name} ({a.get(name, 'absent')} and {b.get(name, 'absent')})"
            for name in dict.fromkeys([*a, *b])
            if a.get(name) != b.get(name)
        ]
        if odd:
            shown = ", ".join(odd[:5]) + (f" and {len(odd) - 5} more" if len(odd) > 5 else "")
            raise ValueError(
                f"{self.name} and {other.name} do not have the same parameters: {shown}. Heads of different size can "
                "be left out of both: task2vec(…, leave_out='fc.*'); different architectures cannot be compared"
            )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a safetensors file, whole or not at all."""
        about = {key: getattr(self, key) for key in ("name", "n", "classes", "average", "labels")}
        return save_statistics(dict(self.fisher), path, kind=KIND, provenance=dict(self.provenance), **about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Task2Vec:
        """Read what `save` wrote."""
        fisher, about = load_statistics(path, kind=KIND)
        if not all(isinstance(part, Tensor) for part in fisher.values()):
            raise DamagedFile(f"{path} is damaged: a Task2Vec embedding holds tensors only")
        try:
            return cls(fisher=fisher, **about)
        except TypeError as error:
            raise DamagedFile(f"{path} is damaged: {error}") from error

    def __repr__(self) -> str:
        tensors, numbers = len(self.fisher), sum(part.numel() for part in self.fisher.values())
        trace = sum(float(part.sum()) for part in self.fisher.values())
        what = "entries" if self.average == "parameters" else "filters"
        return (
            f"<Task2Vec of {self.name}: {numbers:,} {what} in {tensors} tensors, sum {trace:.4g}, {self.n} inputs, "
            f"{self.classes} classes, {self.labels}>"
        )


def task2vec(
    model: Any,
    data: Any,
    *,
    parameters: str | Sequence[str] = "*",
    leave_out: str | Sequence[str] = (),
    average: str = "parameters",
    exact: bool = False,
    draws: int = 1,
    seed: int = 0,
    prepare: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    max_rows: int | None = None,
) -> Task2Vec:
    """The Task2Vec embedding: E_x E_{y ~ p(y|x)} (∂ log p(y|x) / ∂θ)² for each parameter θ (Achille et al. 2019).

    `model`: a classifier whose outputs are logits (n, classes), or a specification; `data` as in `compare`. The model
    runs in eval mode and is left as found; all parameters count, frozen ones too. y is drawn from the model's own
    prediction, `draws` times per input, by a hash of the input's index and `seed`, so that the batch size does not
    matter; `exact` takes the expectation over all classes instead, at one backward pass per class.

    `parameters`, `leave_out`: names or globs, e.g. leave_out="fc.*" where heads differ. `average`: "parameters" keeps
    one entry per parameter; "filters" takes the mean over each filter, which is what lies below one entry of a tensor's
    first dimension (tensors of one dimension stay as they are).
    """
    one_of(average, "average", AVERAGES)
    whole_number(draws, "draws", least=1)
    network = Network.of(model, prepare=prepare, inputs=inputs, device=device)
    n = classes = 0

    def cotangents(logits: Tensor) -> list[Tensor]:
        """∂ log p(y) / ∂ logits = onehot(y) − p for each y, times the root of its weight."""
        nonlocal classes
        _, log_p = log_p_of(network, logits, chunk.count)
        p, classes = log_p.exp(), log_p.shape[1]
        if exact:
            each, root = torch.eye(classes, dtype=p.dtype, device=p.device), (log_p / 2).exp()
            return [root[:, y, None] * (each[y] - p) for y in range(classes)]
        labels = (drawn_labels(log_p, chunk.start, seed=seed, draw=draw) for draw in range(draws))
        return [(one_hot(y, classes) - p) / draws**0.5 for y in labels]

    with network.borrowed():
        squares = SquaredGradients(network, _chosen(network, parameters, leave_out))
        for chunk in chunks_of(Stream.reading(data, max_rows), f"Fisher information of {network.name}"):
            squares.add(chunk, cotangents)
            n += chunk.count
        # Where a square is not finite, neither is the sum; it is taken on the device, so that one number each moves.
        totals = [total.sum().reshape(1) for total in squares.sums.values()]
        whole = torch.cat([total.to(totals[0].device) for total in totals]).tolist()
        if bad := [name for name, total in zip(squares.sums, whole, strict=True) if not math.isfinite(total)]:
            raise ValueError(
                f"{network.name}: gradients are NaN or infinite (or too large to square) at {', '.join(bad[:5])}"
            )
        fisher = {name: total.div_(n).cpu() for name, total in squares.sums.items()}
    if average == "filters":
        fisher = {name: part.flatten(1).mean(1) if part.ndim > 1 else part for name, part in fisher.items()}
    labels = "expected over all classes" if exact else f"{draws} drawn per input, seed {seed}"
    settings = {"parameters": parameters, "leave_out": leave_out, "device": str(device or "the model's own")}
    about = provenance(settings=settings, models=[network.describe()], data=data)
    return Task2Vec(network.name, fisher, n, classes, average, labels, about)


def _chosen(network: Network, parameters: str | Sequence[str], leave_out: str | Sequence[str]) -> dict[str, Any]:
    known: dict[str, nn.Parameter] = {}
    for raw, parameter in unwrap(network.model).named_parameters():
        known[".".join(part for part in raw.split(".") if part != "_orig_mod")] = parameter
    if not known:
        raise ValueError(f"{network.name} has no parameters, so no Fisher information")
    names = _matching(parameters, known) - _matching(leave_out, known)
    chosen = {name: parameter for name, parameter in known.items() if name in names}
    if not chosen:
        raise ValueError(f"{network.name}: no parameters are left: parameters={parameters!r}, leave_out={leave_out!r}")
    if odd := [name for name, parameter in chosen.items() if not parameter.is_floating_point()]:
        raise ValueError(f"{network.name}: {', '.join(odd)} are not real numbers; leave them out with leave_out=")
    return chosen


def _matching(patterns: str | Sequence[str], known: Mapping[str, Any]) -> set[str]:
    matching: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        names = {pattern} & set(known) or {name for name in known if fnmatchcase(name, pattern)}
        if not names:
            raise ValueError(f"no parameter {pattern!r}{nearest(pattern, known)}")
        matching |= names
    return matching


# The Fisher–Rao norm of a classifier, from its logits alone


@dataclass(frozen=True)
class FisherRao:
    """‖θ‖_fr of a model on data."""

    name: str
    norm: float
    layers: int  # L, the hidden layers; the norm is (L + 1) √mean
    n: int
    under: str

    def distance(self, other: FisherRao) -> float:
        """|a − b| / √(a b) of the two norms; with the same L the factor L + 1 cancels."""
        for each in (self, other):
            if not each.norm > 0:
                raise ValueError(f"{each.name}: the Fisher–Rao norm is {each.norm:g}, and the distance divides by it")
        # √(a/b) − √(b/a) is the same, without a product of norms that could overflow.
        ratio = (self.norm / other.norm) ** 0.5
        return abs(ratio - 1 / ratio)


def fisher_rao_norm(
    model: Any,
    data: Any,
    layers: int | None = None,
    *,
    under: str = "labels",
    labels: Any = None,
    seed: int = 0,
    prepare: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    max_rows: int | None = None,
) -> FisherRao:
    """‖θ‖_fr with ‖θ‖_fr² = (L + 1)² E ⟨f, ∇_f ℓ⟩², f the logits and ℓ the cross-entropy (Liang et al. 2019).

    For layers without biases and activations like ReLU it is E ⟨θ, ∇_θ ℓ⟩², so it needs no gradient at parameters.
    `layers` is L, the number of hidden layers. None counts the calls of Linear and convolutional layers in a forward
    and takes one less, which makes L + 1 the number of weight layers; shortcuts with a convolution count too.

    `under`: the expectation is over inputs and "labels", those of the data (or `labels`, as in `compare_outputs`), over
    labels "expected" under the model's own p(y|x), or over labels "drawn" from it with `seed`, one per input.
    """
    one_of(under, "under", UNDER)
    if layers is not None:
        whole_number(layers, "layers", least=0, why="the number of hidden layers")
    if labels is not None and under != "labels":
        raise ValueError(f"labels were given, but under={under!r} does not read them")
    network = Network.of(model, prepare=prepare, inputs=inputs, device=device)
    given = Labels(labels)
    total, n = 0.0, 0
    with network.borrowed():
        for chunk in chunks_of(Stream.reading(data, max_rows), f"Fisher–Rao norm of {network.name}"):
            if layers is None:
                layers = _hidden_layers(network, chunk)
            f, log_p = log_p_of(network, network.outputs(chunk), chunk.count)
            # ⟨f, ∇_f ℓ⟩ with ∇_f ℓ = p − onehot(y): the mean logit under p less the logit of y. Relative to the largest
            # logit: p − onehot sums to 0, so a shift changes only the rounding.
            p, f = log_p.exp(), f - f.amax(1, keepdim=True)
            mean = (f * p).sum(1)
            if under == "expected":
                squares = (p * (f - mean[:, None]).square()).sum(1)
            else:
                drawn = under == "drawn"
                y = drawn_labels(log_p, chunk.start, seed=seed, draw=0) if drawn else _given_labels(given, chunk, f)
                squares = (mean - f.gather(1, y[:, None])[:, 0]).square()
            total += float(squares.sum())
            n += chunk.count
    assert layers is not None
    return FisherRao(network.name, (layers + 1) * (total / n) ** 0.5, layers, n, under)


def _given_labels(labels: Labels, chunk: Chunk, logits: Tensor) -> Tensor:
    given = labels.of(chunk)
    if given is None:
        raise ValueError(
            "the data have no labels: give (x, y) batches or labels=, or use the model's own answers with "
            "under='expected'"
        )
    if len(given) != chunk.count:
        raise ValueError(f"{chunk.count} inputs, but {len(given)} labels")
    return check_labels(given, "labels", logits.shape[1]).to(logits.device)


def _hidden_layers(network: Network, chunk: Chunk) -> int:
    """The number of calls of weight layers in one forward, without the last."""
    kinds = {type(module) for module in network.model.modules() if isinstance(module, WEIGHT_LAYERS)}
    try:
        if not kinds:
            raise SilentSite("there are none")
        with watch(network.model, list(kinds), sink=lambda *_: None) as seen:
            network.outputs(chunk)
    except SilentSite as error:
        raise ValueError(
            f"{network.name}: no Linear or convolutional layer ran ({error}); give layers=, the number of hidden ones"
        ) from error
    return len(seen.sites) - 1
