"""Which images are whose."""

from __future__ import annotations

import pytest
import torch
from small_clients import some_clients

from sosie.train.federated import Clients, split_classes, split_tasks


def labels(classes: int, each: int) -> torch.Tensor:
    return (torch.arange(classes * each) * 7) % classes if classes % 7 else torch.arange(classes * each) % classes


@pytest.mark.parametrize(("clients", "classes"), [(20, 5), (7, 3), (10, 10), (1, 4)])
def test_each_client_has_its_classes_in_equal_numbers(clients: int, classes: int) -> None:
    train, test = labels(10, 60), labels(10, 20)
    parts = split_classes(train, clients, classes, test_labels=test, seed=1)
    pool = torch.cat([train, test])
    sets = []
    for own, tested in zip(parts.train, parts.test, strict=True):
        counts, test_counts = pool[own].bincount(minlength=10), pool[tested].bincount(minlength=10)
        assert int((counts > 0).sum()) == classes
        assert len(counts[counts > 0].unique()) == 1
        assert torch.equal(counts > 0, test_counts > 0)
        sets.append(tuple(counts.nonzero().flatten().tolist()))
    assert len(parts.train.unique()) == parts.train.numel()  # no image goes to two clients
    assert len(parts.test.unique()) == parts.test.numel()
    assert int(parts.train.max()) < len(train) <= int(parts.test.min())
    dealt = torch.tensor(sets).flatten().bincount(minlength=10)
    assert int(dealt.max() - dealt.min()) <= 1
    for i in range(clients):
        for j in range(clients):
            assert (parts.tasks[i] == parts.tasks[j]) == (sets[i] == sets[j])
    if (clients, classes) == (20, 5):
        assert parts.train.shape == (20, 30)  # ten clients a class, six images each: all are used
        assert torch.equal(parts.train, split_classes(train, 20, 5, test_labels=test, seed=1).train)
        assert not torch.equal(parts.train, split_classes(train, 20, 5, test_labels=test, seed=2).train)


def test_clients_that_share_a_task_divide_its_images() -> None:
    train, test = labels(20, 50), labels(20, 10)
    parts = split_tasks(train, 4, 5, test_labels=test, seed=0)
    assert parts.tasks.tolist() == [task for task in range(4) for _ in range(5)]
    assert parts.train.shape == (20, 50)
    assert parts.test.shape == (20, 10)
    assert len(parts.train.unique()) == 1000
    for own, task in zip(parts.train, parts.tasks, strict=True):
        assert train[own].bincount(minlength=20).nonzero().flatten().tolist() == list(range(5 * task, 5 * task + 5))
    few = split_tasks(train, 4, 5, test_labels=test, seed=0, per_class=3, test_per_class=1)
    assert few.train.shape == (20, 15)
    assert few.test.shape == (20, 5)


def pool(classes: int, each: int, clients: int, value: int) -> Clients:
    y, tested = labels(classes, each), labels(classes, 20)
    images = torch.full((len(y) + len(tested), 1, 2, 2), value, dtype=torch.uint8)
    parts = split_classes(y, clients, 2, test_labels=tested, seed=0, per_class=4, test_per_class=2)
    return Clients(images, torch.cat([y, tested]), *parts)


def test_two_sets_of_clients_are_joined() -> None:
    a, b = pool(4, 40, 6, 1), pool(3, 30, 4, 2)
    both = a.joined(b)
    assert len(both) == 10
    assert both.classes == 7
    assert both.images[both.train[6:]].unique().tolist() == [2]
    assert both.images[both.test[:6]].unique().tolist() == [1]
    assert torch.equal(both.labels[both.train[6:]], b.labels[b.train] + 4)
    assert not set(both.tasks[:6].tolist()) & set(both.tasks[6:].tolist())


def test_what_is_wrong_is_said() -> None:
    images, y = torch.zeros(9, 1, 2, 2), torch.arange(9) % 3
    train, test, tasks = torch.arange(4).view(2, 2), torch.arange(4, 8).view(2, 2), torch.zeros(2)
    Clients(images, y, train, test, tasks)
    assert torch.equal(Clients(images, y, list(train), test, tasks).train, train)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"train: clients have \[1, 2\] images, .* drop some images"):
        Clients(images, y, [torch.tensor([0, 1]), torch.tensor([2])], test, tasks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"train: need the numbers of images as \(clients, n\)"):
        Clients(images, y, torch.empty(0, 2, dtype=torch.long), test, tasks)
    with pytest.raises(ValueError, match=r"test: need the numbers of images as \(clients, n\)"):
        Clients(images, y, train, torch.empty(2, 0, dtype=torch.long), tasks)
    with pytest.raises(ValueError, match="images 5 to 9 are named, the pool has 9"):
        Clients(images, y, train, test + 2 - (test < 5) * 1, tasks)
    with pytest.raises(ValueError, match="image 3 is used for training and for testing"):
        Clients(images, y, train, test - 1, tasks)
    with pytest.raises(ValueError, match=r"one label per image, .* got 9 images, torch.int64 \(8,\)"):
        Clients(images, y[:8], train, test, tasks)
    with pytest.raises(ValueError, match="whole numbers"):
        Clients(images, y.float(), train, test, tasks)
    with pytest.raises(ValueError, match="from -1 on"):
        Clients(images, y - 1, train, test, tasks)
    with pytest.raises(ValueError, match="tasks of 3: need those of the same clients"):
        Clients(images, y, train, test, torch.zeros(3))
    with pytest.raises(ValueError, match="there are 3 to deal out"):
        split_classes(y, 2, 4, test_labels=y, seed=0)
    with pytest.raises(ValueError, match=r"class . has 3 training images for 4 clients: 0 for each"):
        split_classes(y, 4, 3, test_labels=y, seed=0)
    with pytest.raises(ValueError, match="3 classes cannot be cut into 2 tasks"):
        split_tasks(y, 2, 1, test_labels=y, seed=0)
    a = pool(4, 40, 6, 1)
    with pytest.raises(ValueError, match=r"8 images to train on .*; and .* 4 images to train on"):
        a.joined(Clients(a.images, a.labels, a.train[:, :4], a.test, a.tasks))


def test_clients_are_shown_without_their_images() -> None:
    assert repr(some_clients()) == "<Clients: 4 with 12 images to train on and 5 to test on each, 2 tasks>"
