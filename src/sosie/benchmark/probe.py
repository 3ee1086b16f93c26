"""A linear probe: multinomial logistic regression on a site's features, as a reference for sketched classifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..capture import Rule
from ..checks import listed, positive
from ..process_state import products
from ..sketching import Sketch, sketch
from ..train import Recipe, accuracy, fit

STEPS = 1000  # of L-BFGS at most
CONVERGED = 1e-5  # largest gradient of the mean loss at convergence, for columns of unit variance


def linear_probe(
    model: Any,
    data: Any,
    test: Any,
    *,
    sites: str | Sequence[str],
    recipe: Recipe | None = None,
    penalty: float = 1.0,
    seed: int = 0,
    rows: Rule = "flatten",
    prepare: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    memory: int | str | None = None,
) -> dict[str, float]:
    """Train a linear classifier on the features of each site, for `data`, and return its accuracy on `test`.

    The model runs once over the data and once over the test set, and its rows are kept (`memory`: the budget). Their
    columns are scaled to mean 0 and variance 1 over the training rows; weights start at 0. `recipe`: train in batches
    whose order comes from `seed`. None: L-BFGS over all rows until the gradient vanishes, on the summed loss plus
    penalty ‖W‖²/2 (without a penalty, linearly separable classes have no optimum; a recipe has no penalty).

    For a ridge probe, in closed form: `classify(sketch(model, data, size=None, kernels="features"), "features")`.
    """
    positive(penalty, "penalty")
    options: Any = {"rows": rows, "prepare": prepare, "inputs": inputs, "device": device, "memory": memory}
    seen, new = (sketch(model, part, sites=sites, size=None, kernels="features", **options) for part in (data, test))
    labels, test_labels = _labels(seen, "data"), _labels(new, "test")
    if unknown := sorted(set(test_labels.tolist()) - set(labels.tolist())):
        raise ValueError(f"the test set has classes that the data do not: {listed(unknown)}")
    accuracies = {}
    with products():
        for site in seen.side.sites:
            train, held = _standard(_rows(seen, site), _rows(new, site), site)
            classes = int(labels.max()) + 1
            head = nn.utils.skip_init(nn.Linear, train.shape[1], classes, dtype=train.dtype, device=train.device)
            for weights in head.parameters():
                nn.init.zeros_(weights)  # the loss is convex, so no random start is needed
            if recipe is None:
                train, held = train.double(), held.double()  # a line search ends too early in float32
                _converge(head.double(), train, labels, penalty, site)
            else:
                fit(head, train, labels, recipe=recipe, seed=seed, task=f"probing {site}")
            accuracies[site] = accuracy(head, held, test_labels)
    return accuracies


def _rows(sketched: Sketch, site: str) -> Tensor:
    part = sketched.site(site).features
    assert part is not None
    return part.rows


def _labels(sketched: Sketch, name: str) -> Tensor:
    if sketched.labels is None:
        raise ValueError(f"{name} has no labels: give batches of (inputs, labels), under a rule with one row per input")
    return sketched.labels.argmax(1)


def _standard(train: Tensor, held: Tensor, site: str) -> tuple[Tensor, Tensor]:
    """Columns scaled to mean 0 and variance 1 over the training rows, without those that are constant there."""
    mean, spread = train.double().mean(0), train.double().std(0, correction=0)
    varied = spread > torch.finfo(train.dtype).eps * mean.abs()
    if not bool(varied.any()):
        raise ValueError(f"all {len(train)} rows of {site} are the same: a probe has nothing to learn from them")
    mean, spread, dtype = mean[varied], spread[varied], train.dtype
    train, held = (((rows[:, varied].double() - mean) / spread).to(dtype) for rows in (train, held))
    return train, held


def _converge(head: nn.Linear, rows: Tensor, labels: Tensor, penalty: float, site: str) -> None:
    optimiser = torch.optim.LBFGS(
        head.parameters(),
        max_iter=STEPS,
        max_eval=2 * STEPS,
        tolerance_grad=CONVERGED / 2,
        tolerance_change=0.0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = functional.cross_entropy(head(rows), labels) + penalty / (2 * len(rows)) * head.weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    loss()
    largest = max(float(weights.grad.abs().amax()) for weights in head.parameters() if weights.grad is not None)
    if not largest <= CONVERGED:
        raise RuntimeError(
            f"the probe of {site} has not converged after {STEPS} steps, with a gradient of {largest:.1g}: give a "
            "larger penalty, or a recipe"
        )
