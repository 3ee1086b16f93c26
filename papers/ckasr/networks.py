"""Networks with a penalty: how they are trained, side by side, and what is written down of each."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sosie.data import open_images
from sosie.files import write_atomically
from sosie.models import DynamicViT, build_model, with_dynamic_tokens
from sosie.train import Augment, Penalty, TokenPenalty, accuracy, calibrate_tokens, fit_side_by_side, random_masks
from sosie.train import Recipe as TrainingRecipe
from sosie.train.sparse import epsilon_sparsity, weight_histogram

if TYPE_CHECKING:
    from run import Settings


# How networks are trained, and what is added to their loss. What the paper has instead is in [brackets].


@dataclass(frozen=True)
class Recipe:
    """How networks are trained; images are cropped and mirrored."""

    epochs: int
    batch: int = 128
    rate: float = 0.1
    decay: float = 5e-4
    optimiser: str = "sgd"
    warmup: float = 0  # epochs in which the rate rises
    images: int | None = None  # at most
    schedule: str = "cosine"  # of the rate


@dataclass(frozen=True)
class Arm:
    """A penalty on how alike a network's layers are; weight 0 is none."""

    name: str
    weight: float = 8e-4
    measure: str = "linear_cka"
    pairs: str = "stage"
    reduce: str = "sum"
    rows: int | None = None  # of each batch; None: all
    every: int = 1  # steps
    rule: str = "flatten"


NONE = Arm("none", 0.0)


CKA_SR = Arm("cka_sr")  # ordered pairs within a stage, its input among them, summed


AUGMENTED = Arm("augcka_sr", pairs="all", reduce="mean")  # as the listing: a mean over all pairs of blocks


CCA = Arm("cca", measure="mean_cca", rule="mean", every=10)  # [every step]: decompositions keep a GPU waiting


def sampled(rows: int | None, every: int, weight: float) -> Arm:
    """An arm of table 2: CKA-SR on so many rows of a batch, once in so many batches."""
    if rows is None and every == 1 and weight == CKA_SR.weight:
        return CKA_SR  # table 3 has it
    return Arm(f"{'all' if rows is None else rows}_rows_every_{every}_{weight:g}", weight, rows=rows, every=every)


# Images that stay on the device as bytes, and their normalisation.


CLASSES = {"cifar10": 10, "cifar100": 100}
STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5075, 0.4867, 0.4411), (0.2673, 0.2565, 0.2762)),
}
SYNTHETIC = 32  # images of a smoke run


@lru_cache
def images(settings: Settings, name: str, split: str) -> tuple[Tensor, Tensor]:
    """(N, 3, 32, 32) as bytes, and labels."""
    if settings.synthetic:
        generator = torch.Generator().manual_seed(len(name + split))
        drawn = torch.randint(0, 256, (SYNTHETIC, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return drawn.to(settings.device), (torch.arange(SYNTHETIC) % CLASSES[name]).to(settings.device)
    found = open_images(name, split=split)
    assert found.labels is not None
    return found.images.to(settings.device), found.labels.to(settings.device)


@lru_cache
def prepare(settings: Settings, name: str) -> Callable[[Tensor], Tensor]:
    """[0, 1] to normalised; the constants are kept on the device, so that nothing waits for them."""
    mean, std = (torch.tensor(each, device=settings.device).view(3, 1, 1) for each in STATISTICS[name])
    return lambda x: (x - mean) / std


def probes(settings: Settings, name: str, count: int) -> Tensor:
    """The first test images, normalised."""
    found = images(settings, name, "test")[0][:count]
    if len(found) < count:
        raise ValueError(f"{name} has {len(found)} test images, {count} are asked for")
    return prepare(settings, name)(found.float() / 255)


# What is known of a network: how alike its layers are, how its weights lie, and how hard a penalty pulls at it.


Rows = list[dict[str, Any]]


def penalty_of(model: nn.Module, arm: Arm) -> Penalty | None:
    if arm.weight == 0:
        return None
    return Penalty(
        model,
        arm.measure,
        weight=arm.weight,
        pairs=arm.pairs,
        reduce=arm.reduce,
        rows=arm.rows,
        every=arm.every,
        rule=arm.rule,  # type: ignore[arg-type]
    )


@torch.no_grad()
def pairs_of(
    model: nn.Module, x: Tensor, measure: str, *, pairs: Any = "stage", sites: Any = None, rule: Any = "flatten"
) -> Rows:
    """What a penalty would see, of all rows at once: `site_a`, `site_b`, `value`; in the network's own mode."""
    look = Penalty(model, measure, sites, weight=1.0, pairs=pairs, reduce="mean", rows=None, every=1, rule=rule)
    look.__enter__()
    try:
        model(x)
        look()
        return look.last
    finally:
        look.__exit__(ValueError, None, None)  # as after an error: constant layers are in the rows, and need no warning


def mean_of(rows: Rows) -> float | None:
    """Of the pairs that have a value: a constant layer has none."""
    each = [row["value"] for row in rows if row["value"] is not None]
    return sum(each) / len(each) if each else None


def similarity(settings: Settings, model: nn.Module, dataset: str) -> dict[str, float | None]:
    """Mean over pairs of blocks within a stage, its input among them: what CKA-SR lowers.

    `penalised`: CKA of as many test images as a batch has, as the penalty has it; the others of all probes.
    """
    x = probes(settings, dataset, settings.probes)
    return {
        "penalised": mean_of(pairs_of(model, x[: settings.few], "linear_cka")),
        "biased": mean_of(pairs_of(model, x, "linear_cka")),
        "debiased": mean_of(pairs_of(model, x, "debiased_cka")),
        "all_pairs": mean_of(pairs_of(model, x, "debiased_cka", pairs="all")),
    }


def layer_map(settings: Settings, model: nn.Module, dataset: str) -> dict[str, Any]:
    """Every convolution with every other, biased and debiased."""
    x = probes(settings, dataset, settings.probes)
    found: dict[str, Any] = {}
    for measure in ("linear_cka", "debiased_cka"):
        rows = pairs_of(model, x, measure, pairs="all", sites=nn.Conv2d)
        names = list(dict.fromkeys(name for row in rows for name in (row["site_a"], row["site_b"])))
        value = {frozenset((row["site_a"], row["site_b"])): row["value"] for row in rows}
        found["sites"] = names
        found[measure] = [[1.0 if a == b else rounded(value[frozenset((a, b))]) for b in names] for a in names]
    return found


def information(settings: Settings, model: nn.Module, dataset: str) -> dict[str, Any]:
    """Gaussian information in nats between blocks of a stage, channels averaged over space, beside their CKA.

    Infinite where a channel of one block is a linear function of the other's: such pairs are counted, and left out.
    """
    x = probes(settings, dataset, settings.probes)
    within = [row for row in pairs_of(model, x, "linear_cka") if not row["site_a"].startswith("input of ")]
    found: list[tuple[float, float]] = []
    for row in within:
        pair = [(row["site_a"], row["site_b"])]
        try:
            nats = pairs_of(model, x, "gaussian_information", pairs=pair, rule="mean")[0]["value"]
        except ValueError:  # infinite, or too few rows for so many channels
            nats = None
        if nats is not None and row["value"] is not None:
            found.append((row["value"], nats))
    mean = sum(nats for _, nats in found) / len(found) if found else None
    return {"nats": mean, "pairs": len(within), "finite": len(found), "points": found}


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


# Weights


def layers(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Weights of convolutions and linear layers, flat, and which of them are kept."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight.detach().flatten()
            mask = getattr(module, "weight_mask", None)
            found[name] = weight, torch.ones_like(weight, dtype=torch.bool) if mask is None else mask.flatten().bool()
    return found


def weights(settings: Settings, model: nn.Module) -> dict[str, Any]:
    """ε-sparsity of all weights and of those that are kept, in numbers and in units of each layer, and a histogram."""
    every = list(layers(model).values())
    kept = [own for weight, mask in every if len(own := weight[mask])]
    together = torch.cat(kept)
    scaled = torch.cat([own / own.square().mean().sqrt() for own in kept]).abs()
    return {
        "all": {f"{epsilon:g}": epsilon_sparsity(model, epsilon) for epsilon in settings.epsilons},
        "kept": {f"{epsilon:g}": share(together.abs() <= epsilon) for epsilon in settings.epsilons},
        "relative": share(scaled <= settings.relative_epsilon),
        "rms": float(together.square().mean().sqrt()),
        "density": len(together) / sum(len(weight) for weight, _ in every),
        "limit": settings.limit,
        "histogram": weight_histogram(model, settings.bins, settings.limit)[0].tolist(),
    }


def share(chosen: Tensor) -> float:
    return float(chosen.float().mean())


# How hard it pulls


def gradient_share(settings: Settings, model: nn.Module, dataset: str, arm: Arm) -> float | None:
    """Length of the penalty's gradient over that of the task's, of kept weights, in a step of training that is due."""
    if arm.weight == 0:
        return None
    model = copy.deepcopy(model).train()  # whose batch norms may count the step
    bytes_, labels = (side[: settings.few] for side in images(settings, dataset, "train"))
    x = prepare(settings, dataset)(bytes_.float() / 255)
    chosen = {f"{name}.weight": mask for name, (_, mask) in layers(model).items()}
    own = [parameter for name, parameter in model.named_parameters() if name in chosen]
    masks = [chosen[name] for name, _ in model.named_parameters() if name in chosen]
    look = penalty_of(model, arm)
    assert look is not None
    look.__enter__()
    try:
        loss = functional.cross_entropy(model(x), labels)
        term = look()
        if not term.requires_grad:  # all layers are constant
            return None
        lengths = [_length(torch.autograd.grad(each, own, retain_graph=True, allow_unused=True), masks)
                   for each in (term, loss)]  # fmt: skip
    finally:
        look.__exit__(ValueError, None, None)
    return lengths[0] / lengths[1] if lengths[1] else None


def _length(grads: tuple[Tensor | None, ...], masks: list[Tensor]) -> float:
    squares = [g.flatten()[mask].double().square().sum() for g, mask in zip(grads, masks, strict=True) if g is not None]
    return float(torch.stack(squares).sum().sqrt())


# Networks trained side by side, and what is written down of each: the only place that calls sosie's training.


Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A network to train. The seed is that of its first weights, its mask and the order of the images."""

    dataset: str
    network: str
    recipe: Recipe
    seed: int
    arm: Arm = NONE
    sparsity: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()  # of the architecture

    def record_in(self, folder: Path) -> Path:
        """Where its record is kept: another recipe is another file."""
        key = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return folder / f"{self.dataset}-{self.network}-{self.sparsity:g}-{self.arm.name}-seed{self.seed}-{key}.json"

    def build(self, device: str) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return build_model(self.network, {"classes": CLASSES[self.dataset], **dict(self.options)}).to(device)


def train(settings: Settings, jobs: Sequence[Job]) -> dict[Job, Record]:
    """The record of each job; networks that have none yet are trained, so many at once, and written down at once."""
    settings.cache.mkdir(parents=True, exist_ok=True)
    missing = [job for job in jobs if not job.record_in(settings.cache).is_file()]
    for group in _groups(missing, settings.at_once):
        for job, record in zip(group, _train(settings, group), strict=True):
            text = json.dumps(record) + "\n"
            write_atomically(job.record_in(settings.cache), lambda path, text=text: path.write_text(text, "utf-8"))
    return {job: json.loads(job.record_in(settings.cache).read_text("utf-8")) for job in jobs}


def _groups(jobs: Iterable[Job], at_once: int) -> list[list[Job]]:
    """Networks that go well together: of one architecture and recipe; those that decompose matrices by themselves."""
    alike: dict[Any, list[Job]] = {}
    for job in jobs:
        key = job.dataset, job.network, job.recipe, job.arm.measure, job.arm.every == 1
        alike.setdefault(key, []).append(job)
    return [each[k : k + at_once] for each in alike.values() for k in range(0, len(each), at_once)]


def _train(settings: Settings, jobs: Sequence[Job]) -> list[Record]:
    """One record a job; where a network diverges, the others are trained without it."""
    models = [job.build(settings.device) for job in jobs]
    masks = [random_masks(model, job.sparsity, how="erk", seed=job.seed) if job.sparsity else None
             for model, job in zip(models, jobs, strict=True)]  # fmt: skip
    before = [_look(settings, job, model) for job, model in zip(jobs, models, strict=True)]
    start = time.perf_counter()
    try:
        with ExitStack() as stack:
            penalties = [penalty_of(model, job.arm) for job, model in zip(jobs, models, strict=True)]
            entered = [each and stack.enter_context(each) for each in penalties]
            seeds = [job.seed for job in jobs]
            fit_models(settings, models, jobs[0].dataset, jobs[0].recipe, seeds, penalties=entered, masks=masks)
    except ValueError as error:
        if "NaN or infinite" not in str(error):
            raise
        print(f"{', '.join(job.record_in(Path()).stem for job in jobs)}: {error}", flush=True)
        if len(jobs) == 1:
            return [{**before[0], "diverged": True, "accuracy": None, "seconds": time.perf_counter() - start}]
        middle = len(jobs) // 2
        return _train(settings, jobs[:middle]) + _train(settings, jobs[middle:])
    _wait(settings)
    seconds = (time.perf_counter() - start) / len(jobs)
    return [_record(settings, *each, seconds) for each in zip(jobs, models, before, strict=True)]


def _look(settings: Settings, job: Job, model: nn.Module) -> Record:
    as_trained = copy.deepcopy(model).train()  # before training batch norms know of no other statistics
    return {
        "job": asdict(job),
        "diverged": False,
        "before": similarity(settings, as_trained, job.dataset),
        "gradient_share_before": gradient_share(settings, model, job.dataset, job.arm),
    }


def _record(settings: Settings, job: Job, model: nn.Module, before: Record, seconds: float) -> Record:
    model.eval()
    found = {
        **before,
        "accuracy": 100 * tested(settings, model, job.dataset, 2000),
        "seconds": seconds,
        "after": similarity(settings, model, job.dataset),
        "gradient_share": gradient_share(settings, model, job.dataset, job.arm),
        "weights": weights(settings, model),
    }
    if job.seed in settings.map_seeds:
        found["map"] = layer_map(settings, model, job.dataset)
    if job.seed in settings.information_seeds:
        found["information"] = information(settings, model, job.dataset)
    return found


def tested(settings: Settings, model: nn.Module, dataset: str, batch: int) -> float:
    model.eval()
    x, labels = images(settings, dataset, "test")
    return accuracy(model, x, labels, batch=batch, prepare=prepare(settings, dataset))


def step_seconds(settings: Settings, arms: Sequence[Arm], steps: int = 100) -> dict[str, float]:
    """Seconds of a step of one network by itself, without recorded graphs; the first steps are not counted."""
    found = {}
    for arm in arms:
        job = Job("cifar10", settings.network, settings.sparse, 0, arm, options=settings.options)
        with ExitStack() as stack:
            model = job.build(settings.device)
            penalty = penalty_of(model, arm)
            own = penalty and stack.enter_context(penalty)
            for count in (min(steps, 20), steps):
                recipe = replace(job.recipe, epochs=1, images=count * job.recipe.batch, rate=1e-3)
                start = time.perf_counter()
                fit_models(settings, [model], job.dataset, recipe, [0], penalties=[own])
                _wait(settings)
            x = images(settings, job.dataset, "train")[0][: recipe.images]
            found[arm.name] = (time.perf_counter() - start) / -(-len(x) // recipe.batch)
    return found


def _wait(settings: Settings) -> None:
    if settings.device.startswith("cuda"):
        torch.cuda.synchronize()


def fit_models(
    settings: Settings,
    models: Sequence[nn.Module],
    dataset: str,
    recipe: Recipe,
    seeds: Sequence[int],
    *,
    penalties: Sequence[Callable[[], Tensor] | None] | None = None,
    masks: Sequence[Any] | None = None,
) -> None:
    x, labels = images(settings, dataset, "train")
    fit_side_by_side(
        models,
        x[: recipe.images],
        labels[: recipe.images],
        recipe=TrainingRecipe(
            epochs=recipe.epochs,
            batch=recipe.batch,
            rate=recipe.rate,
            optimiser=recipe.optimiser,
            decay=recipe.decay,
            schedule=recipe.schedule,
            warmup=recipe.warmup,
            augment=Augment(),
            prepare=prepare(settings, dataset),
            mixed=settings.mixed,
        ),
        seeds=seeds,
        penalties=penalties,
        masks=masks,
        at_once=settings.at_once,
        task=f"{len(models)} on {dataset}",
    )


def fit_dynamic(settings: Settings, plain: Sequence[nn.Module], keeps: Sequence[float]) -> list[DynamicViT]:
    """Each transformer with tokens dropped, taught by itself as it was, and told how alike its tokens are."""
    chosen = settings.tokens
    models = [with_dynamic_tokens(model, keep, gamma=chosen.gamma, seed=0)
              for model, keep in zip(plain, keeps, strict=True)]  # fmt: skip
    with ExitStack() as stack:
        penalties = [stack.enter_context(TokenPenalty(model, teacher, ratio=chosen.ratio_weight))
                     for model, teacher in zip(models, plain, strict=True)]  # fmt: skip
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(0)  # of which tokens are drawn
        fit_models(settings, models, chosen.dataset, chosen.then, [0] * len(models), penalties=penalties)
    known = images(settings, chosen.dataset, "train")[0][: chosen.calibration]
    for model in models:
        calibrate_tokens(model.eval(), known, prepare=prepare(settings, chosen.dataset))
    return models
