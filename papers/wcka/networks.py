"""Two populations, perceptrons from scratch and heads on a frozen trunk, trained in processes of their own."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sosie.benchmark import Scale
from sosie.benchmark.population import (
    Agreement,
    Architecture,
    BenchmarkFolder,
    Images,
    Population,
    agreements,
    make_population,
    open_benchmark_images,
    perceptron,
)
from sosie.benchmark.trials import CalibrationNetworks, Ground
from sosie.data import open_images
from sosie.train import Recipe, accuracy, fit

if TYPE_CHECKING:
    from run import Settings


# Tasks in processes of their own: training small networks is launch-bound, and measures take one core each.


START = time.monotonic()
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_pools: dict[int, ProcessPoolExecutor] = {}


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


def each(settings: Settings, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], what: str) -> list[Any]:
    """function(settings, *task) for every task, in their order; the first ones are begun first."""
    found: list[Any] = [None] * len(tasks)
    say(f"{what}: {len(tasks)} tasks")
    if not settings.workers:
        return [function(settings, *task) for task in tasks]
    pool, start = _pool(settings.workers), time.monotonic()
    waiting = {pool.submit(_timed, function, settings, task): k for k, task in enumerate(tasks)}
    for done, future in enumerate(as_completed(waiting), 1):
        found[waiting[future]], seconds = future.result()
        if seconds > 5 or done == len(tasks):
            say(f"{what}: {done} of {len(tasks)} ({_named(tasks[waiting[future]])}: {seconds:.1f} s)")
    say(f"{what}: done in {time.monotonic() - start:.1f} s")
    return found


def _named(task: tuple[Any, ...]) -> str:
    scales = [f"{s.architectures} {s.strategies}" for s in task if isinstance(s, Scale) and len(s.architectures) == 1]
    return ", ".join([str(part) for part in task if isinstance(part, (str, int))] + scales)


def _timed(function: Callable[..., Any], settings: Settings, task: tuple[Any, ...]) -> tuple[Any, float]:
    start = time.monotonic()
    return function(settings, *task), time.monotonic() - start


def _pool(workers: int) -> ProcessPoolExecutor:
    if workers not in _pools:
        before = {name: os.environ.get(name) for name in THREADS}
        os.environ.update(dict.fromkeys(THREADS, "1"))  # what processes inherit: one core each
        pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
        )
        for _ in range(workers):
            pool.submit(int)  # begun while the variables are set
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _pools[workers] = pool
    return _pools[workers]


# The two populations: perceptrons from scratch, and heads on a frozen convolutional trunk.


SCRATCH, HEADS = "scratch", "heads"
FEATURES = 32 * 4 * 4
ORDER = ("pgd", "fgs", "sta")  # strategies, the slowest first


def convolutional() -> nn.Sequential:
    """Two convolutions with 64 and 32 kernels of 5 × 5, each pooled, and a hidden layer of 1,024; ten classes."""
    convolutions = (nn.Conv2d(1, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 32, 5), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 10))


class Frozen(nn.Module):
    """A trunk that all heads share: it has no parameters that a network's own state would hold."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self._shared = (trunk,)  # in a tuple: not registered

    def forward(self, x: Tensor) -> Tensor:
        return self._shared[0](x)


class Study:
    """One population: its networks, trained once; how far they agree; what measures are told of them."""

    def __init__(self, settings: Settings, name: str, device: str) -> None:
        self.settings, self.name, self.device = settings, name, torch.device(device)
        self.scale: Scale = settings.scratch if name == SCRATCH else settings.heads
        self.images: Images = open_benchmark_images(self.scale, seed=settings.seed, device=self.device)
        facts = {"scale": asdict(self.scale), "data": self.images.name, "seed": settings.seed}
        self.store = BenchmarkFolder(settings.cache / name, facts)

    @cached_property
    def trunk(self) -> nn.Sequential:
        model = convolutional()[:6]
        model.load_state_dict(load_file(trunk_path(self.settings)), strict=True)
        return model.to(self.device).eval().requires_grad_(False)

    def make(self, architecture: Architecture) -> nn.Sequential:
        if self.name == SCRATCH:
            return perceptron(architecture, self.images.inputs, self.images.classes)
        return nn.Sequential(Frozen(self.trunk), *perceptron(architecture, FEATURES, self.images.classes))

    def train(self, scale: Scale) -> None:
        """A part of the population, into the store."""
        make_population(scale, self.images, self.store, seed=self.settings.seed, make=self.make)

    def agree(self, scale: Scale) -> Agreement:
        return agreements(scale, self.images, self.population, self.store, seed=self.settings.seed)

    @cached_property
    def population(self) -> Population:
        return make_population(self.scale, self.images, self.store, seed=self.settings.seed, make=self.make)

    @cached_property
    def weighed(self) -> Population:
        """The same networks as measures of weights see them: heads without the trunk that they share."""
        if self.name == SCRATCH:
            return self.population
        return replace(self.population, models=tuple(nn.Sequential(*list(m)[1:]) for m in self.population.models))

    @cached_property
    def seen(self) -> Images:
        """What the first layer of those weights reads."""
        if self.name == SCRATCH:
            return self.images
        with torch.no_grad():
            train, test = (torch.cat([self.trunk(x) for x in part.split(500)]).flatten(1)
                           for part in (self.images.train, self.images.test))  # fmt: skip
        return replace(self.images, train=train, test=test)

    @cached_property
    def ground(self) -> Ground:
        agreement = self.agree(self.scale)
        found = Ground(self.scale, self.weighed, agreement, self.seen.test, seed=self.settings.seed)
        found.inputs = self.images.test.flatten(1).double()  # dCKA regresses out the images, not the trunk's features
        return found

    @cached_property
    def probes(self) -> CalibrationNetworks:
        return CalibrationNetworks(self.scale, self.images, self.population, seed=self.settings.seed)


@lru_cache
def study(settings: Settings, name: str, device: str = "cpu") -> Study:
    return Study(settings, name, device)


def trunk_path(settings: Settings) -> Any:
    return settings.cache / "trunk.safetensors"


def train_trunk(settings: Settings) -> float:
    """Trained on all ten classes; its accuracy with the hidden layer that the heads replace."""
    data = [open_images("mnist", split=split).read(0, settings.trunk_images) for split in ("train", "test")]
    (x, y), (test_x, test_y) = ((i.to(settings.device), labels.to(settings.device)) for i, labels in data)
    torch.manual_seed(settings.seed)
    model = convolutional().to(settings.device)
    fit(
        model,
        x,
        y,
        recipe=Recipe(epochs=settings.trunk_epochs, batch=settings.trunk_batch, rate=1e-3, schedule="constant"),
        seed=settings.seed,
    )
    settings.cache.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous().cpu() for k, v in model[:6].state_dict().items()}, trunk_path(settings))
    return accuracy(model.eval(), test_x, test_y)


def train_part(settings: Settings, name: str, scale: Scale) -> None:
    """Steps of small perceptrons cost their overhead: a core for each recipe is no slower than a shared GPU."""
    study(settings, name, "cpu" if name == SCRATCH else settings.device).train(scale)


def agree_part(settings: Settings, name: str, scale: Scale) -> None:
    study(settings, name, settings.device).agree(scale)


def agree(settings: Settings, name: str) -> None:
    """Every condition by itself, the longest first, into the store."""
    scale = study(settings, name).scale
    attacks = sorted(scale.attacks, key=lambda kind: not kind.startswith(("pgd", "trades")))
    parts = [replace(scale, corruptions=(), attacks=(kind,)) for kind in attacks]
    parts += [replace(scale, corruptions=(kind,), attacks=()) for kind in scale.corruptions]
    each(settings, agree_part, [(name, part) for part in parts], f"agreement, {name}")


def networks(settings: Settings) -> dict[str, Any]:
    """All of them, recipe by recipe, those that take longest first; then how well they do."""
    trunk_accuracy = train_trunk(settings)
    say(f"trunk: accuracy {trunk_accuracy:.4f}")
    parts = [*parts_of(settings, SCRATCH), *parts_of(settings, HEADS)]
    parts.sort(key=_slowest_first)
    parts.insert(1, (SCRATCH, replace(settings.scratch, architectures=(), random=0)))
    each(settings, train_part, parts, "training")
    rows = [row for name in (SCRATCH, HEADS) for row in _accuracies(study(settings, name, settings.device))]
    final = {
        f"{name}_{strategy.partition('(')[0]}_accuracy": _mean(rows, name, strategy)
        for name in (SCRATCH, HEADS)
        for strategy in study(settings, name).scale.strategies
    }
    worst = min(row["accuracy"] for row in rows if row["last"])
    return {"numbers": {"trunk_accuracy": trunk_accuracy, **final, "worst_final_accuracy": worst}, "networks": rows}


def parts_of(settings: Settings, name: str) -> list[tuple[str, Scale]]:
    """One population, recipe by recipe."""
    scale = settings.scratch if name == SCRATCH else settings.heads
    return [
        (name, replace(scale, architectures=(a,), strategies=(s,), random=0, converged=0))
        for a, s in itertools.product(scale.architectures, scale.strategies)
    ]


def _slowest_first(part: tuple[str, Scale]) -> tuple[int, int]:
    return ORDER.index(part[1].strategies[0][:3]), -part[1].architectures[0][0]


def train_population(settings: Settings, name: str) -> None:
    """One population by itself, with its own trunk."""
    if name == HEADS and not trunk_path(settings).is_file():
        train_trunk(settings)
    each(settings, train_part, sorted(parts_of(settings, name), key=_slowest_first), f"training, {name}")


def _accuracies(at: Study) -> list[dict[str, Any]]:
    return [
        {
            "population": at.name, "architecture": f"{m.architecture[0]}x{m.architecture[1]}", "strategy": m.strategy,
            "seed": m.seed, "epoch": m.epoch, "last": m.epoch == max(at.scale.epochs),
            "accuracy": accuracy(model, at.images.test, at.images.test_labels),
        }
        for m, model in zip(at.population.members, at.population.models, strict=True)
    ]  # fmt: skip


def _mean(rows: list[dict[str, Any]], name: str, strategy: str) -> float:
    found = [r["accuracy"] for r in rows if r["population"] == name and r["strategy"] == strategy and r["last"]]
    return sum(found) / len(found)
