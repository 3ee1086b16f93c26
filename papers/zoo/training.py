"""Experiments `train` and `finetune`: the zoo's networks, and what becomes of them on tasks that none has seen."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from counting import spearman
from data import Images, Prepare, learnt, task, tested
from networks import (
    Job,
    all_jobs,
    architecture_of,
    copy_jobs,
    fine_tuned_jobs,
    fresh,
    is_there,
    path_of,
    pruned,
    read,
    record_of,
    rounded,
    scratch_jobs,
    with_new_head,
    write,
)
from settings import Recipe, Settings, Source, Target
from torch import nn

from sosie.files import write_atomically
from sosie.models import atom_layers, freeze
from sosie.train import Augment, accuracy, fit_side_by_side
from sosie.train import Recipe as TrainingRecipe

Make = Callable[[Job, Source], nn.Module]


def train(s: Settings) -> dict[str, Any]:
    """All networks, those that are there kept; manifest.json lists them."""
    s.nets.mkdir(parents=True, exist_ok=True)
    before = {job.name: job for job in scratch_jobs(s)}

    def from_scratch(job: Job, source: Source) -> nn.Module:
        return fresh(s, architecture_of(s, job), source.classes, job.start)

    def from_parent(job: Job, source: Source) -> nn.Module:
        assert job.parent is not None
        return with_new_head(s, before[job.parent], source.classes, job.start)

    def as_parent(job: Job, _: Source) -> nn.Module:
        assert job.parent is not None
        model = read(s, before[job.parent])
        return freeze(model, "coefficients") if atom_layers(model) else model

    copies = copy_jobs(s)
    _train(s, scratch_jobs(s), from_scratch, s.scratch, half=0)
    _train(s, fine_tuned_jobs(s), from_parent, s.fine_tune, half=0)
    _train(s, [job for job in copies if job.relation == "trained_on"], as_parent, s.train_on, half=1)
    for job in copies:
        change = {"pruned": pruned, "rounded": rounded}.get(job.relation)
        if change and not is_there(s, job, None):
            source = _source(s, job)
            _write(s, [job], [change(as_parent(job, source))], source, None, 0.0)
    records = [record_of(s, job) for job in all_jobs(s)]
    write_atomically(s.nets / "manifest.json", json.dumps(records, indent=1) + "\n")
    return {"numbers": _summary(s, records), "networks": records}


def _train(s: Settings, jobs: Sequence[Job], make: Make, recipe: Recipe, half: int) -> None:
    """So many at once as go well together, and written down as soon as they are trained."""
    for source in s.sources:
        missing = [job for job in jobs if job.dataset == source.name and not is_there(s, job, recipe)]
        for group in _groups(missing, s.at_once):
            models = [make(job, source) for job in group]
            start = time.perf_counter()
            _fit(s, models, learnt(s, source, half), recipe, [job.start for job in group], f"networks of {source.name}")
            _write(s, group, models, source, recipe, (time.perf_counter() - start) / len(group))


def _groups(jobs: Sequence[Job], at_once: int) -> Iterator[Sequence[Job]]:
    return (jobs[k : k + at_once] for k in range(0, len(jobs), at_once))


def _fit(
    s: Settings, models: Sequence[nn.Module], images: Images, recipe: Recipe, seeds: Sequence[int], what: str
) -> None:
    fit_side_by_side(
        models,
        images.images,
        images.labels,
        recipe=TrainingRecipe(
            epochs=recipe.epochs(len(images)),
            batch=recipe.batch,
            rate=recipe.rate,
            optimiser="adam",
            decay=recipe.decay,
            schedule="cosine",
            augment=Augment(pad=2, mirror=False),
            prepare=Prepare(s.device),
            mixed=s.mixed,
        ),
        seeds=seeds,
        at_once=s.at_once,
        task=what,
    )


def _write(
    s: Settings, jobs: Sequence[Job], models: Sequence[nn.Module], source: Source, recipe: Recipe | None, seconds: float
) -> None:
    for job, model in zip(jobs, models, strict=True):
        reached = _accuracy(s, model, tested(s, source))
        if not all(bool(value.isfinite().all()) for value in model.state_dict().values()):
            raise ValueError(f"{job.name} has diverged: lower the rate in settings.py")
        about = {"classes": source.classes, "accuracy": reached, "seconds": round(seconds, 2)}
        write(s, job, model, about, recipe)


def _accuracy(s: Settings, model: nn.Module, images: Images) -> float:
    return accuracy(model.eval(), images.images, images.labels, batch=1000, prepare=Prepare(s.device))


def _source(s: Settings, job: Job) -> Source:
    return next(each for each in s.sources if each.name == job.dataset)


def _summary(s: Settings, records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How many, how large, and how well they do what they were trained for, over what guessing gives."""
    own = [each for each in records if each["relation"] == "scratch"]
    numbers = {
        "networks": len(records),
        "largest_parameters": max(each["parameters"] for each in records),
        "megabytes": sum(path_of(s, job).stat().st_size for job in all_jobs(s)) / 1e6,
        "least_over_chance": min(each["accuracy"] * each["classes"] for each in own),
    }
    for source in s.sources:
        reached = [each["accuracy"] for each in own if each["dataset"] == source.name]
        numbers[f"accuracy_{source.name}"] = sum(reached) / len(reached)
    return numbers


# What fine-tuning really gives


def finetune(s: Settings) -> dict[str, Any]:
    """Every network from scratch, fine-tuned whole on every target: accuracy on images it has not seen."""
    return _finetune(s, 0)


def finetune_again(s: Settings) -> dict[str, Any]:
    """The same with another head and another order of the images: how far the truth agrees with itself."""
    found, first = _finetune(s, 1), _finetune(s, 0)["accuracies"]
    agreed = [spearman(first[name], reached) for name, reached in found["accuracies"].items()]
    found["numbers"]["agreement"] = sum(each or 0.0 for each in agreed) / len(agreed)
    return found


def _finetune(s: Settings, seed: int) -> dict[str, Any]:
    jobs = scratch_jobs(s)
    found = {target.name: _reached(s, target, jobs, seed) for target in s.targets}
    numbers = {f"mean_{name}": sum(reached) / len(reached) for name, reached in found.items()}
    numbers |= {f"spread_{name}": max(reached) - min(reached) for name, reached in found.items()}
    return {"numbers": numbers, "models": [job.name for job in jobs], "accuracies": found}


def _reached(s: Settings, target: Target, jobs: Sequence[Job], seed: int) -> list[float]:
    """The accuracy of each network on one target; a file of its own, so that a run that was ended can go on."""
    key = {"target": repr(target), "recipe": repr(s.real), "seed": seed, "models": [job.name for job in jobs]}
    path = s.nets / f"finetune-{target.name}-{seed}.json"
    if path.is_file() and (kept := json.loads(path.read_text("utf-8")))["of"] == key:
        return list(kept["accuracies"])
    images, unseen = task(s, target, "train"), task(s, target, "test")
    reached = []
    for group in _groups(jobs, s.at_once):
        models = [with_new_head(s, job, len(target.classes), 10_000 + seed) for job in group]
        _fit(s, models, images, s.real, [seed] * len(group), f"fine-tuning for {target.name}")
        reached += [round(_accuracy(s, model, unseen), 5) for model in models]
        if s.device.startswith("cuda"):
            torch.cuda.synchronize()
    write_atomically(path, json.dumps({"of": key, "accuracies": reached}) + "\n")
    return reached
