"""The images of each client: a pool of images, and which of them each client trains and is tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """Numbers of images, for `Clients(images, labels, *parts)` with training images first, then test images."""

    train: Tensor  # (clients, n)
    test: Tensor  # (clients, t)
    tasks: Tensor  # (clients,): clients of one number have the same classes


@dataclass(frozen=True, eq=False)
class Clients:
    """A pool of images with labels, and the numbers of the images of each client; all have equally many."""

    images: Tensor  # (N, channels, height, width), uint8 or floating point
    labels: Tensor  # (N,)
    train: Tensor  # (clients, n): numbers of images; a list with one tensor per client is stacked
    test: Tensor  # (clients, t)
    tasks: Tensor  # (clients,): which data a client has

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            table = getattr(self, name)
            if not isinstance(table, Tensor):  # one tensor per client
                if len(sizes := {len(numbers) for numbers in table}) != 1:
                    raise ValueError(
                        f"{name}: clients have {sorted(sizes)} images, but they train together and need equally many: "
                        "drop some images"
                    )
                table = torch.stack([torch.as_tensor(numbers) for numbers in table])
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
            raise ValueError(f"image {number} is used for training and for testing: separate the two")

    def __len__(self) -> int:
        return len(self.train)

    def __repr__(self) -> str:
        return f"<Clients: {len(self)} with {self._counts}, {len(self.tasks.unique())} tasks>"

    @property
    def _counts(self) -> str:
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
        """Both sets of clients, these first; the other's classes and tasks are numbered after these."""
        kinds = [f"{c.images.dtype} {tuple(c.images.shape[1:])}, {c._counts}" for c in (self, other)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"need images of one kind and equally many per client, got {kinds[0]}; and {kinds[1]} (`per_class` "
                "of a split decides how many)"
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

    The numbers of clients of two classes differ by at most one. A client has `per_class` training and `test_per_class`
    test images of each class (None: as many as there are for all).
    """
    known = labels.unique()
    if not 1 <= classes <= len(known):
        raise ValueError(f"classes={classes}: there are {len(known)} to deal out")
    generator = torch.Generator().manual_seed(seed)
    used = torch.zeros(len(known), dtype=torch.long)
    dealt = []
    for _ in range(clients):
        # Those dealt least often so far, in random order.
        chosen = (used + torch.rand(len(known), generator=generator, dtype=torch.float64)).argsort()[:classes]
        used[chosen] += 1
        dealt.append(known.cpu()[chosen].sort().values)
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
    """Divide the classes, in their order, into tasks; `sharing` clients divide the images of each task, by class.

    Further arguments as of `split_classes`.
    """
    known = labels.unique().cpu()
    if tasks < 1 or len(known) % tasks:
        raise ValueError(f"{len(known)} classes cannot be cut into {tasks} tasks of equally many")
    dealt = [classes for classes in known.chunk(tasks) for _ in range(sharing)]
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
    sets = [tuple(classes.tolist()) for classes in dealt]
    numbers = {classes: k for k, classes in enumerate(dict.fromkeys(sets))}
    return Parts(train, test + len(labels), torch.tensor([numbers[classes] for classes in sets]))


def _divided(
    labels: Tensor, dealt: Sequence[Tensor], per_class: int | None, generator: torch.Generator, what: str
) -> Tensor:
    """The numbers of each client's images, (clients, classes × images of each)."""
    clients_of = torch.cat(list(dealt)).bincount(minlength=int(labels.max()) + 1)
    available = labels.bincount(minlength=len(clients_of))
    wanted = clients_of > 0
    largest = int((available[wanted] // clients_of[wanted]).min())
    count = largest if per_class is None else per_class
    if not 1 <= count <= largest:
        scarce = int((available / clients_of).where(wanted, torch.inf).argmin())
        raise ValueError(
            f"class {scarce} has {int(available[scarce])} {what} images for {int(clients_of[scarce])} clients: "
            f"{largest} for each, but {max(count, 1)} are needed; take fewer clients, or fewer classes for each"
        )
    piles = {
        int(c): (labels == c).nonzero().flatten()[torch.randperm(int(available[c]), generator=generator)].split(count)
        for c in wanted.nonzero().flatten()
    }
    left = {c: iter(pile) for c, pile in piles.items()}
    return torch.stack([torch.cat([next(left[int(c)]) for c in classes]) for classes in dealt])
