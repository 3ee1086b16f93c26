"""Whose images are whose: a pool of images, and which of them each client trains and is tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """Numbers of images, training images first: `Clients(images, labels, *parts)` with the test images behind them."""

    train: Tensor  # (clients, n)
    test: Tensor  # (clients, t)
    tasks: Tensor  # (clients,): clients of one number have the same classes


@dataclass(frozen=True, eq=False)
class Clients:
    """A pool of images with labels, and the numbers of those that each client has; all have equally many."""

    images: Tensor  # (N, channels, height, width), uint8 or floating point
    labels: Tensor  # (N,)
    train: Tensor  # (clients, n): numbers of images; a list with one tensor per client is stacked
    test: Tensor  # (clients, t)
    tasks: Tensor  # (clients,): which data a client has

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            table = getattr(self, name)
            if not isinstance(table, Tensor):  # one tensor per client
                if len(sizes := {len(own) for own in table}) != 1:
                    raise ValueError(
                        f"{name}: clients have {sorted(sizes)} images; they are trained together and need equally "
                        "many: drop some images"
                    )
                table = torch.stack([torch.as_tensor(own) for own in table])
                object.__setattr__(self, name, table)
            if table.ndim != 2 or not table.numel() or table.is_floating_point():
                got = f"{table.dtype} {tuple(table.shape)}"
                raise ValueError(f"{name}: need the numbers of images as (clients, n), got {got}")
            if int(table.min()) < 0 or int(table.max()) >= len(self.images):
                named = f"images {int(table.min())} to {int(table.max())} are named"
                raise ValueError(f"{name}: {named}, the pool has {len(self.images)}")
        labels = self.labels
        if labels.shape != (len(self.images),) or labels.is_floating_point() or int(labels.min()) < 0:
            got = f"{labels.dtype} {tuple(labels.shape)} from {labels.min().item()} on"
            raise ValueError(f"need one label per image, whole numbers from 0 on; got {len(self.images)} images, {got}")
        object.__setattr__(self, "labels", labels.long())
        if not len(self.train) == len(self.test) == len(self.tasks):
            raise ValueError(
                f"training images of {len(self.train)} clients, test images of {len(self.test)}, tasks of "
                f"{len(self.tasks)}: need those of the same clients"
            )
        both = torch.isin(self.test.flatten(), self.train.flatten())
        if bool(both.any()):
            number = int(self.test.flatten()[both][0])
            raise ValueError(f"image {number} is used for training and for testing: no client may be tested on it")

    def __len__(self) -> int:
        return len(self.train)

    def __repr__(self) -> str:
        return f"<Clients: {len(self)} with {self._each}, {len(self.tasks.unique())} tasks>"

    @property
    def _each(self) -> str:
        return f"{self.train.shape[1]} images to train on and {self.test.shape[1]} to test on each"

    @property
    def classes(self) -> int:
        """The number of classes in the pool."""
        return int(self.labels.max()) + 1

    def to(self, device: torch.device | str) -> Clients:
        """A copy with everything on a device."""
        names = ("images", "labels", "train", "test", "tasks")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def joined(self, other: Clients) -> Clients:
        """Both, ours first; the other's classes and tasks are numbered after ours."""
        kinds = [f"{c.images.dtype} {tuple(c.images.shape[1:])}, {c._each}" for c in (self, other)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"need images alike and equally many for each client, got {kinds[0]}; and {kinds[1]} (`per_class` of a "
                "split decides how many)"
            )
        return Clients(
            torch.cat([self.images, other.images]),
            torch.cat([self.labels, other.labels + self.classes]),
            torch.cat([self.train, other.train + len(self.images)]),
            torch.cat([self.test, other.test + len(self.images)]),
            torch.cat([self.tasks, other.tasks + int(self.tasks.max()) + 1]),
        )


def split_classes(
    labels: Tensor,
    clients: int = 100,
    classes: int = 5,
    *,
    test_labels: Tensor,
    seed: int,
    per_class: int | None = None,
    test_per_class: int | None = None,
) -> Parts:
    """Give each client images of `classes` classes, equally many of each; no image goes to two clients.

    Each class goes to as many clients as any other, or to one more. A client has `per_class` training and
    `test_per_class` test images of each class (None: as many as there are for all).
    """
    known = labels.unique()
    if not 1 <= classes <= len(known):
        raise ValueError(f"classes={classes}: there are {len(known)} to deal out")
    generator = torch.Generator().manual_seed(seed)
    used = torch.zeros(len(known), dtype=torch.long)
    dealt = []
    for _ in range(clients):
        # Those dealt least often so far, in random order.
        own = (used + torch.rand(len(known), generator=generator, dtype=torch.float64)).argsort()[:classes]
        used[own] += 1
        dealt.append(known.cpu()[own].sort().values)
    return _dealt(labels, test_labels, dealt, per_class, test_per_class, generator)


def split_tasks(
    labels: Tensor,
    tasks: int = 20,
    sharing: int = 5,
    *,
    test_labels: Tensor,
    seed: int,
    per_class: int | None = None,
    test_per_class: int | None = None,
) -> Parts:
    """Cut the classes, in their order, into tasks; `sharing` clients divide the images of each task, class by class.

    Further arguments as of `split_classes`.
    """
    known = labels.unique().cpu()
    if tasks < 1 or len(known) % tasks:
        raise ValueError(f"{len(known)} classes cannot be cut into {tasks} tasks of equally many")
    dealt = [own for own in known.chunk(tasks) for _ in range(sharing)]
    return _dealt(labels, test_labels, dealt, per_class, test_per_class, torch.Generator().manual_seed(seed))


def _dealt(
    labels: Tensor,
    test_labels: Tensor,
    dealt: Sequence[Tensor],
    per_class: int | None,
    test_per_class: int | None,
    generator: torch.Generator,
) -> Parts:
    train = _divided(labels.cpu(), dealt, per_class, generator, "training")
    test = _divided(test_labels.cpu(), dealt, test_per_class, generator, "test")
    sets = [tuple(own.tolist()) for own in dealt]
    numbers = {own: k for k, own in enumerate(dict.fromkeys(sets))}
    return Parts(train, test + len(labels), torch.tensor([numbers[own] for own in sets]))


def _divided(
    labels: Tensor, dealt: Sequence[Tensor], per_class: int | None, generator: torch.Generator, what: str
) -> Tensor:
    """Numbers of each client's images, (clients, classes × images of each)."""
    clients_of = torch.cat(list(dealt)).bincount(minlength=int(labels.max()) + 1)
    there = labels.bincount(minlength=len(clients_of))
    wanted = clients_of > 0
    goes_round = int((there[wanted] // clients_of[wanted]).min())
    count = goes_round if per_class is None else per_class
    if not 1 <= count <= goes_round:
        scarce = int((there / clients_of).where(wanted, torch.inf).argmin())
        raise ValueError(
            f"class {scarce} has {int(there[scarce])} {what} images for {int(clients_of[scarce])} clients: "
            f"{goes_round} for each, but {max(count, 1)} are wanted; take fewer clients, or fewer classes for each"
        )
    piles = {
        int(c): (labels == c).nonzero().flatten()[torch.randperm(int(there[c]), generator=generator)].split(count)
        for c in wanted.nonzero().flatten()
    }
    left = {c: iter(pile) for c, pile in piles.items()}
    return torch.stack([torch.cat([next(left[int(c)]) for c in own]) for own in dealt])
