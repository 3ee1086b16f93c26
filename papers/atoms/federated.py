"""Tables 1 and 3: federated learning by several methods, and clients that ask others for help."""

from __future__ import annotations

import copy
import time
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from continual import wait
from data import Lessons, Prepare, pool, probes
from networks import make
from settings import Recipe, Settings
from similarity import by_stimulus, look, mean
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from training import train

from sosie.linalg import most_similar
from sosie.models.atoms import freeze
from sosie.train.federated import Clients, Federated, ensemble_accuracy, simulate, split_classes

ATOMS = 9
TABLE_1 = ("fedavg", "ditto", "fedrep", "fedprox", "fedper", "pretrain")
TABLE_3 = ("fedavg", "fedprox", "fedper", "fedrep", "ditto", "local", "atoms")
STIMULUS = ("cca", "linear_cka")
CHOICES = ("atoms", *STIMULUS, "random", "own", "classes")
CLASSES = {"cifar100": 100, "cifar10": 10}


def clients_of(settings: Settings, data: str, classes: int, seed: int) -> Clients:
    images, test = (pool(settings, data, split) for split in ("train", "test"))
    parts = split_classes(images.labels, settings.federation.clients, classes, test_labels=test.labels, seed=seed)
    both = images.merge(test).images, torch.cat([images.labels, test.labels])
    return Clients(*both, *parts)


@lru_cache
def pretrained(settings: Settings, seed: int) -> nn.Module:
    """Coefficients from other images: all of a network trained on CIFAR-10, then held."""
    images = pool(settings, "cifar10", "train")
    model = make(settings, "small_cnn", CLASSES["cifar100"], ATOMS, seed)
    recipe = Recipe(epochs=settings.federation.pretrained_epochs)
    state = train(settings, [model], images, Lessons.of(images, [list(range(10))]), recipe, seed=seed)[recipe.epochs]
    model.load_state_dict({name: value[0] for name, value in state.items()})
    return freeze(model, "coefficients")


def learn(
    settings: Settings, clients: Clients, data: str, method: str, seed: int, last: str | None = None
) -> Federated:
    """`pretrain` is local training of all but the coefficients; `last`: what each client trains at the end."""
    f = settings.federation

    def fresh() -> nn.Module:
        if method == "pretrain":
            return copy.deepcopy(pretrained(settings, seed))
        return make(settings, "small_cnn", CLASSES[data], ATOMS, seed)

    return simulate(
        fresh,
        clients,
        "local" if method == "pretrain" else method,
        rounds=f.rounds,
        epochs=f.epochs,
        share=f.share,
        seed=seed,
        batch=f.batch,
        rate=f.rate,
        prepare=Prepare(settings),
        last=last,  # type: ignore[arg-type]
    )


def table_1(settings: Settings) -> dict[str, Any]:
    """Base, and ensembles with three members chosen by each measure, at random, the client itself, and by its classes.

    All methods end with atoms, biases and head trained on the coefficients that the server has, so that atoms can be
    compared (Ditto's clients have coefficients of their own, pulled towards the server's).
    """
    f = settings.federation
    rows: list[dict[str, Any]] = []
    for seed in f.seeds:
        clients = clients_of(settings, "cifar100", 5, seed)
        for method in TABLE_1:
            found = learn(settings, clients, "cifar100", method, seed, "own")
            seconds, similarity = similarities(settings, found)
            similarity["classes"] = overlap(clients)
            generator = torch.Generator().manual_seed(seed)
            right: dict[str, list[Tensor]] = {}
            for name, members in choices(similarity, f.members, f.random_members, generator):
                answer = ensemble_accuracy(
                    found, clients, members, epochs=f.head_epochs, seed=seed, prepare=Prepare(settings)
                )  # fmt: skip
                right.setdefault(name, []).append(answer.ensemble.cpu())
                right.setdefault("base", []).append(answer.own.cpu())
            accuracy = {name: torch.stack(each).mean(0).tolist() for name, each in right.items()}
            shared = share_of_classes(similarity, f.members)
            rows.append({"seed": seed, "method": method, "accuracy": accuracy, "seconds": seconds, "shared": shared})
            print(f"  {method}, seed {seed}: {np.mean(accuracy['base']):.3f}", flush=True)
            last = found
    costs = counted(settings, last)
    return {"numbers": numbers_of(rows, costs), "rows": rows, "costs": costs}


def choices(
    similarity: dict[str, Tensor], count: int, drawings: int, generator: torch.Generator
) -> list[tuple[str, Tensor]]:
    """Members (clients, k) by each measure, some drawings at random, and the client itself."""
    clients = len(similarity["atoms"])
    found = [(name, most_similar(each, count)) for name, each in similarity.items()]
    for _ in range(drawings):
        noise = torch.rand(clients, clients, generator=generator)
        found.append(("random", most_similar(noise + noise.T, count)))
    return [*found, ("own", torch.arange(clients)[:, None])]


def similarities(settings: Settings, found: Federated) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Of all pairs of clients by each measure, and the seconds that took: what is shown to networks included."""
    seconds, pairs = {}, {}
    for name in ("atoms", *STIMULUS):
        wait(settings)
        start = time.perf_counter()
        pairs[name] = by_measure(settings, found, name)
        wait(settings)
        seconds[name] = time.perf_counter() - start
    return seconds, pairs


def by_measure(settings: Settings, found: Federated, name: str) -> Tensor:
    if name == "atoms":
        return found.atoms(require_shared=False).cosines()
    sites = look(settings, found.template, found.state, probes(settings), (name,))
    return mean(by_stimulus(sites, (name,))[name])


def counted(settings: Settings, found: Federated) -> dict[str, Any]:
    """FLOPs of products and convolutions for all pairs of clients, as torch counts them, and GPU memory."""
    costs: dict[str, Any] = {}
    for name in ("atoms", *STIMULUS):
        on_gpu = settings.device.startswith("cuda")
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with FlopCounterMode(display=False) as counter:
            by_measure(settings, found, name)
        memory = (torch.cuda.max_memory_allocated() - before) / 1e6 if on_gpu else 0.0
        costs[name] = {"gflops": counter.get_total_flops() / 1e9, "megabytes": memory}
    return costs


def overlap(clients: Clients) -> Tensor:
    """How many classes two clients have in common: what a measure would have to find."""
    classes = torch.zeros(len(clients), clients.classes)
    classes.scatter_(1, clients.labels[clients.train].cpu(), 1.0)
    return classes @ classes.T


def share_of_classes(similarity: dict[str, Tensor], count: int) -> dict[str, float]:
    """Mean number of classes that a client has in common with the members chosen for it."""
    return {
        name: float(similarity["classes"].gather(1, most_similar(each, count).cpu()).mean())
        for name, each in similarity.items()
    }


def numbers_of(rows: list[dict[str, Any]], costs: dict[str, Any]) -> dict[str, float]:
    """Means over clients and seeds; differences with standard errors over clients."""
    numbers: dict[str, float] = {}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    of = {
        (method, name): np.concatenate([row["accuracy"][name] for row in rows if row["method"] == method])
        for method in methods
        for name in ("base", *CHOICES)
    }
    for method in methods:
        numbers |= {f"{method}_{name}": float(of[method, name].mean()) for name in ("base", *CHOICES)}
        for name, other in (("atoms", "base"), ("atoms", "random"), ("atoms", "own"), ("atoms", "cca")):
            gain = of[method, name] - of[method, other]
            numbers[f"{method}_{name}_less_{other}"] = float(gain.mean())
            numbers[f"{method}_{name}_less_{other}_error"] = float(gain.std(ddof=1) / len(gain) ** 0.5)
    for pair in ("atoms_less_base", "atoms_less_random", "atoms_less_own", "atoms_less_cca"):
        numbers[f"mean_{pair}"] = float(np.mean([numbers[f"{method}_{pair}"] for method in methods]))
    numbers["methods_better"] = float(np.mean([numbers[f"{method}_atoms_less_base"] > 0 for method in methods]))
    for name in ("atoms", *STIMULUS):
        numbers[f"{name}_seconds"] = float(np.min([row["seconds"][name] for row in rows]))
        numbers |= {f"{name}_{key}": value for key, value in costs[name].items()}
        numbers[f"{name}_classes_shared"] = float(np.mean([row["shared"][name] for row in rows]))
    numbers["cca_flops_ratio"] = costs["cca"]["gflops"] / costs["atoms"]["gflops"]
    numbers["cca_time_ratio"] = numbers["cca_seconds"] / numbers["atoms_seconds"]
    return numbers


def table_3(settings: Settings) -> dict[str, Any]:
    """Accuracy without ensembles; each method ends as it does by itself (fedavg and fedprox: all of the model)."""
    return without_ensembles(settings, "cifar100")


def table_3_cifar10(settings: Settings) -> dict[str, Any]:
    return without_ensembles(settings, "cifar10")


def without_ensembles(settings: Settings, asked: str) -> dict[str, Any]:
    rows = []
    numbers: dict[str, float] = {}
    seed = settings.federation.seeds[0]
    for data, classes in settings.federation.settings:
        if data != asked:
            continue
        clients = clients_of(settings, data, classes, seed)
        for method in TABLE_3:
            found = learn(settings, clients, data, method, seed)
            accuracy = found.accuracy.cpu()
            row = {"data": data, "classes": classes, "method": method, "accuracy": accuracy.tolist()}
            rows.append({**row, "before": float(found.before.mean())})
            numbers[f"{data}_{classes}_{method}"] = float(accuracy.mean())
            print(f"  {data} {classes} {method}: {accuracy.mean():.3f}", flush=True)
        others = [numbers[f"{data}_{classes}_{method}"] for method in ("fedavg", "fedprox", "fedper", "fedrep")]
        own = numbers[f"{data}_{classes}_atoms"]
        numbers[f"{data}_{classes}_atoms_less_best"] = own - max(others)
        numbers[f"{data}_{classes}_atoms_less_local"] = own - numbers[f"{data}_{classes}_local"]
    return {"numbers": numbers, "rows": rows}
