"""Tables 1 and 3: federated learning by several methods, and clients that ask others for help."""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from networks import Lessons, Prepare, Recipe, by_stimulus, look, make, mean, pool, probes, train, wait
from running import remember
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sosie.linalg import most_similar
from sosie.models import freeze
from sosie.train import Recipe as TrainingRecipe
from sosie.train.federated import Clients, Federated, ensemble_accuracy, open_method, simulate, split_classes
from sosie.train.heads import find_head

if TYPE_CHECKING:
    from run import Settings


# How much federated learning.


@dataclass(frozen=True)
class Federation:
    """Clients, rounds and methods of tables 1 and 3."""

    clients: int = 100
    many_clients: int = 1000  # of the last column of table 3
    rounds: int = 100
    epochs: int = 15
    share: float = 0.1
    batch: int = 50
    rate: float = 0.01
    seeds: tuple[int, ...] = (0, 1, 2)  # of table 1; table 3 has the first
    pretrained_epochs: int = 20  # of the coefficients of "Pretrain"
    members: int = 3
    head_epochs: int = 100
    random_members: int = 2  # drawings of members at random
    settings: tuple[tuple[str, int], ...] = (("cifar100", 5), ("cifar100", 20), ("cifar10", 2), ("cifar10", 5))
    many_settings: tuple[tuple[str, int], ...] = (("cifar10", 2),)

    @property
    def local_epochs(self) -> int:
        """Of a client that meets nobody: as many as the others have on average, and their last training."""
        return round(self.rounds * self.share * self.epochs) + self.epochs


# Tables 1 and 3: federated learning by several methods, and clients that ask others for help.


ATOMS = 9
TABLE_1 = ("fedavg", "ditto", "fedrep", "fedprox", "fedper", "pretrain")
TABLE_3 = ("fedavg", "fedprox", "fedper", "fedrep", "ditto", "local", "atoms")
STIMULUS = ("cca", "linear_cka")
CHOICES = ("atoms", *STIMULUS, "random", "own", "classes")
CLASSES = {"cifar100": 100, "cifar10": 10}


def clients_of(settings: Settings, data: str, classes: int, seed: int, count: int | None = None) -> Clients:
    images, test = (pool(settings, data, split) for split in ("train", "test"))
    count = count or settings.federation.clients
    parts = split_classes(images.labels, count, classes, test_labels=test.labels, seed=seed)
    both = images.merge(test).images, torch.cat([images.labels, test.labels])
    return Clients(*both, *parts)


@lru_cache
def pretrained(settings: Settings, seed: int) -> nn.Module:
    """Coefficients and atoms from other images: a network trained on CIFAR-10, then coefficients are held.

    The head is a new one, of the seed: that of ten classes would start clients at a loss of 12 and more, from which
    most of their last units die.
    """
    images = pool(settings, "cifar10", "train")
    model = make(settings, "small_cnn", CLASSES["cifar10"], ATOMS, seed)
    recipe = Recipe(epochs=settings.federation.pretrained_epochs)
    lessons = Lessons.of(images, [list(range(CLASSES["cifar10"]))])
    state = train(settings, [model], images, lessons, recipe, seed=seed)[recipe.epochs]
    fresh = make(settings, "small_cnn", CLASSES["cifar100"], ATOMS, seed)
    head = f"{find_head(fresh)}."
    fresh.load_state_dict(fresh.state_dict() | {k: x[0] for k, x in state.items() if not k.startswith(head)})
    return freeze(fresh, "coefficients")


def learn(
    settings: Settings, clients: Clients, data: str, method: str, seed: int, last: str | None = None
) -> Federated:
    """`pretrain` is local training of all but the coefficients; `last`: what each client trains at the end.

    Where nobody meets, each client trains as long as the others do on average: of those that are drawn for a round
    some would else train for hardly more than the end.
    """
    f = settings.federation

    def fresh() -> nn.Module:
        if method == "pretrain":
            return copy.deepcopy(pretrained(settings, seed))
        return make(settings, "small_cnn", CLASSES[data], ATOMS, seed)

    alone = method in ("local", "pretrain")
    way = open_method("local" if alone else method)
    if last is not None:
        way = replace(way, last=replace(way.last, trains=last))
    recipe = TrainingRecipe(
        f.epochs, f.batch, f.rate, optimiser="sgd", schedule="constant", prepare=Prepare(settings)
    )  # fmt: skip
    return simulate(
        fresh,
        clients,
        replace(way, last_epochs=f.local_epochs if alone else None),
        recipe=recipe,
        rounds=0 if alone else f.rounds,
        share=f.share,
        seed=seed,
    )


def asked(settings: Settings, clients: Clients, **more: Any) -> dict[str, Any]:
    """All that decides what a method reaches, seeds and settings of other experiments left out."""
    f = asdict(settings.federation)
    for other in ("seeds", "settings", "many_settings", "many_clients", "clients"):
        del f[other]
    images = {"clients": len(clients), "train": clients.train.shape[1], "test": clients.test.shape[1]}
    return {**f, **images, "width": settings.width, "probes": asdict(settings.probes), **more}


def table_1(settings: Settings) -> dict[str, Any]:
    """Base, and ensembles with three members chosen by each measure, at random, the client itself, and by its classes.

    All methods end with atoms, biases and head trained on the coefficients that the server has, so that atoms can be
    compared (Ditto's clients have coefficients of their own, pulled towards the server's). Seed by seed: a run that is
    ended has all methods of the seeds it has.
    """
    rows: list[dict[str, Any]] = []
    for seed in settings.federation.seeds:
        clients = clients_of(settings, "cifar100", 5, seed)
        for method in TABLE_1:
            of = asked(settings, clients, method=method, seed=seed)
            if method == "pretrain":
                of["pretrained_on"] = len(pool(settings, "cifar10", "train").labels)
            name = f"table-1-{method}-seed{seed}"
            row = remember(
                settings.cache, name, of, lambda m=method, s=seed, c=clients: with_members(settings, c, m, s)
            )
            print(f"  {method}, seed {seed}: {np.mean(row['accuracy']['base']):.3f}", flush=True)
            rows.append({key: row[key] for key in ("seed", "method", "accuracy", "seconds", "shared", "costs")})
    return {"numbers": numbers_of(rows), "rows": rows}


def table_1_short(settings: Settings) -> dict[str, Any]:
    """The same with fewer rounds."""
    return table_1(replace(settings, federation=settings.short_federation))


def with_members(settings: Settings, clients: Clients, method: str, seed: int) -> dict[str, Any]:
    """One method: accuracy of each client alone and with members, and what choosing them costs."""
    f = settings.federation
    found = learn(settings, clients, "cifar100", method, seed, "own")
    seconds, similarity = similarities(settings, found)
    similarity["classes"] = overlap(clients)
    generator = torch.Generator().manual_seed(seed)
    right: dict[str, list[Tensor]] = {}
    heads = TrainingRecipe(f.head_epochs, batch=50, rate=0.01, optimiser="sgd", schedule="constant")
    for name, members in choices(similarity, f.members, f.random_members, generator):
        own, ensemble = ensemble_accuracy(found, clients, members, recipe=heads, seed=seed, prepare=Prepare(settings))
        right.setdefault(name, []).append(ensemble.cpu())
        right.setdefault("base", []).append(own.cpu())
    return {
        "seed": seed,
        "method": method,
        "accuracy": {name: torch.stack(each).mean(0).tolist() for name, each in right.items()},
        "seconds": seconds,
        "shared": share_of_classes(similarity, f.members),
        "costs": counted(settings, found),
    }


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


def numbers_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over clients and seeds; differences with standard errors over clients, and their spread over seeds."""
    costs = rows[-1]["costs"]
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
        numbers |= spread_over_seeds([row["accuracy"] for row in rows if row["method"] == method], method)
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


def spread_over_seeds(accuracies: list[dict[str, list[float]]], method: str) -> dict[str, float]:
    """Standard deviations of a run's mean, as the paper has them behind its ±; none of a single run."""
    if len(accuracies) < 2:
        return {}
    means = {name: np.array([np.mean(each[name]) for each in accuracies]) for name in ("base", *CHOICES)}
    found = {f"{method}_{name}_spread": float(of.std(ddof=1)) for name, of in means.items()}
    for other in ("base", "random", "own", "cca"):
        found[f"{method}_atoms_less_{other}_spread"] = float((means["atoms"] - means[other]).std(ddof=1))
    return found


def table_3(settings: Settings) -> dict[str, Any]:
    """Accuracy without ensembles; each method ends as it does by itself (fedavg and fedprox: all of the model)."""
    return without_ensembles(settings, "cifar100")


def table_3_cifar10(settings: Settings) -> dict[str, Any]:
    return without_ensembles(settings, "cifar10")


def without_ensembles(settings: Settings, asked_data: str) -> dict[str, Any]:
    f = settings.federation
    rows = []
    numbers: dict[str, float] = {}
    seed = f.seeds[0]
    cases = [(*case, f.clients) for case in f.settings] + [(*case, f.many_clients) for case in f.many_settings]
    for data, classes, count in cases:
        if data != asked_data:
            continue
        clients = clients_of(settings, data, classes, seed, count)
        case = f"{data}_{classes}" + ("" if count == f.clients else "_many")
        for method in TABLE_3:
            of = asked(settings, clients, data=data, classes=classes, method=method, seed=seed)
            make_row = partial(by_itself, settings, clients, data, method, seed)
            row = remember(settings.cache, f"table-3-{case}-{method}", of, make_row)
            accuracy = row["accuracy"]
            about = {"data": data, "classes": classes, "clients": count, "method": method}
            rows.append({**about, "accuracy": accuracy, "before": row["before"]})
            numbers[f"{case}_{method}"] = float(np.mean(accuracy))
            print(f"  {case} {method}: {np.mean(accuracy):.3f}", flush=True)
        others = [numbers[f"{case}_{method}"] for method in ("fedavg", "fedprox", "fedper", "fedrep")]
        own = numbers[f"{case}_atoms"]
        numbers[f"{case}_atoms_less_best"] = own - max(others)
        numbers[f"{case}_atoms_less_local"] = own - numbers[f"{case}_local"]
    return {"numbers": numbers, "rows": rows}


def by_itself(settings: Settings, clients: Clients, data: str, method: str, seed: int) -> dict[str, Any]:
    found = learn(settings, clients, data, method, seed)
    return {"accuracy": found.accuracy.tolist(), "before": float(found.before.mean())}
