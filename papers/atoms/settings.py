"""How much of everything: the real run, and a smoke run. What the paper has instead is in [brackets]."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Recipe:
    """How networks are trained: SGD with momentum at a constant rate, no augmentation, no weight decay."""

    epochs: int
    batch: int = 64
    rate: float = 0.01
    momentum: float = 0.9
    images: int | None = None  # a network, at most
    clip: float | None = None  # the gradient of a network to this length, where training diverged without


@dataclass(frozen=True)
class Probes:
    """What networks are asked about, to be compared by what they represent."""

    images: int = 1000  # as the paper's federated study; flattened for CKA
    positions: int = 16_384  # rows for CCA: images × places of a channel, drawn once for all networks of a study


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


@dataclass(frozen=True)
class Settings:
    """The real run."""

    device: str
    results: Path
    cache: Path  # networks that several experiments use
    seed: int = 0
    limit: int | None = None  # images of a data set, at most
    network: str = "alexnet"
    deep: str = "vgg11"
    hidden: int = 1024  # of AlexNet's head
    width: int = 32  # of the clients' network
    probes: Probes = field(default_factory=Probes)
    draws: int = 1000  # of a bootstrap over networks

    tasks: int = 10
    atoms: tuple[int, ...] = (6, 9)
    task: Recipe = Recipe(epochs=12, rate=0.01, images=2450, clip=1.0)  # figure 2; half of a task's images
    whole_task: Recipe = Recipe(epochs=12, rate=0.01, clip=1.0)  # figure-2-seeds: all of a task's images
    figure_2_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    first: Recipe = Recipe(epochs=12, rate=0.01, clip=1.0)  # coefficients from the first task
    weights: tuple[float, ...] = (0.0, 1e-4, 3e-4, 1e-3, 3e-3)  # figure 4b: of the penalty as it is printed
    cosine_weights: tuple[float, ...] = (3e-4, 3e-3)  # of the penalty of normalised channels
    decorrelated: Recipe = Recipe(epochs=8, rate=0.01, images=2450, clip=1.0)
    pair: Recipe = Recipe(epochs=4, rate=0.02, images=25_000, clip=1.0)  # figure 4's table; diverged without clipping
    long_pair: Recipe = Recipe(epochs=60, batch=256, rate=0.04, clip=1.0)  # figure-4-table-long
    long_pair_at: tuple[int, ...] = (4, 15, 30, 60)  # epochs that are looked at
    bound_draws: int = 500
    untrained: Recipe = Recipe(epochs=8, rate=0.02, images=10_000)  # figure 9a
    toys: int = 10  # figure 9b
    toy_steps: int = 300

    dynamics: Recipe = Recipe(epochs=30, batch=256, rate=0.02)  # figure 5, AlexNet [150 epochs]
    deep_dynamics: Recipe = Recipe(epochs=20, batch=256, rate=0.02)  # VGG-11 [20 epochs on ImageNet]
    two_tasks: Recipe = Recipe(epochs=20, rate=0.02)  # figures 12 and 13

    users: Recipe = Recipe(epochs=90, batch=50)  # figure 6
    users_at: tuple[int, ...] = (1, 5, 15, 30, 90)  # epochs that are looked at
    cifar_tasks: int = 20
    a_task: int = 5  # clients that share a task
    digit_clients: int = 20

    federation: Federation = field(default_factory=Federation)
    short_federation: Federation = Federation(rounds=15)  # table-1-short
    continual: Recipe = Recipe(epochs=15, batch=128, rate=0.02)
    continual_head_epochs: int = 50
    continual_seeds: tuple[int, ...] = (0, 1, 2)
    cost_probes: tuple[int, ...] = (100, 300, 1000, 3000, 10_000)


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    tiny = Recipe(epochs=1, batch=8, images=16)
    few = Federation(
        clients=10,
        many_clients=20,
        rounds=1,
        epochs=1,
        share=0.3,
        batch=5,
        seeds=(0,),
        pretrained_epochs=1,
        head_epochs=2,
        random_members=2,
    )
    return replace(
        full,
        limit=800,
        network="small_cnn",
        deep="small_cnn",
        width=4,
        probes=Probes(images=24, positions=2000),
        draws=50,
        tasks=4,
        atoms=(6, 9),
        task=tiny,
        whole_task=tiny,
        figure_2_seeds=(0, 1),
        first=tiny,
        weights=(0.0, 3e-3),
        cosine_weights=(3e-3,),
        decorrelated=tiny,
        pair=tiny,
        long_pair=replace(tiny, epochs=2),
        long_pair_at=(1, 2),
        bound_draws=20,
        untrained=tiny,
        toys=2,
        toy_steps=20,
        dynamics=replace(tiny, epochs=2, images=100),
        deep_dynamics=replace(tiny, epochs=2, images=100),
        two_tasks=replace(tiny, epochs=2),
        users=Recipe(epochs=2, batch=8),
        users_at=(1, 2),
        cifar_tasks=3,
        a_task=2,
        digit_clients=4,
        federation=few,
        short_federation=few,  # the clients of table 1
        continual=tiny,
        continual_head_epochs=2,
        continual_seeds=(0, 1),
        cost_probes=(8, 16),
    )
