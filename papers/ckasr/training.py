"""Networks trained side by side, and what is written down of each: the only place that calls sosie's training."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import looking
import torch
from data import CLASSES, images, prepare
from settings import NONE, Arm, Recipe, Settings
from torch import Tensor, nn

from sosie.files import write_atomically
from sosie.models import DynamicViT, build_model, with_dynamic_tokens
from sosie.train import Augment, TokenPenalty, accuracy, calibrate_tokens, fit_side_by_side, random_masks
from sosie.train import Recipe as TrainingRecipe

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
            penalties = [looking.penalty_of(model, job.arm) for job, model in zip(jobs, models, strict=True)]
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
        "before": looking.similarity(settings, as_trained, job.dataset),
        "gradient_share_before": looking.gradient_share(settings, model, job.dataset, job.arm),
    }


def _record(settings: Settings, job: Job, model: nn.Module, before: Record, seconds: float) -> Record:
    model.eval()
    found = {
        **before,
        "accuracy": 100 * tested(settings, model, job.dataset, 2000),
        "seconds": seconds,
        "after": looking.similarity(settings, model, job.dataset),
        "gradient_share": looking.gradient_share(settings, model, job.dataset, job.arm),
        "weights": looking.weights(settings, model),
    }
    if job.seed in settings.map_seeds:
        found["map"] = looking.layer_map(settings, model, job.dataset)
        found["information"] = looking.information(settings, model, job.dataset)
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
            penalty = looking.penalty_of(model, arm)
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
