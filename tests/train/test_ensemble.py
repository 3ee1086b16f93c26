"""Members whose last layer is fitted to a client's images, all at once, are those fitted alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_clients import RECIPE, WAY, make, some_clients
from torch import Tensor

from sosie.linalg import most_similar
from sosie.train import fit
from sosie.train.federated import Clients, Federated, ensemble_accuracy, simulate
from sosie.train.federated.simulation import order_seed


def refitted(found: Federated, clients: Clients, pupil: int, teacher: int, epochs: int) -> Tensor:
    """What a member answers to a client's test images, by the ordinary loop."""
    model = found.model(teacher).requires_grad_(False)
    model[5].requires_grad_(True)
    own = clients.train[pupil]
    fit(
        model,
        clients.images[own],
        clients.labels[own],
        recipe=replace(RECIPE, epochs=epochs),
        seed=order_seed(0, 0, 0, pupil),
    )
    return model(clients.images[clients.test[pupil]]).softmax(1)


def test_ensembles_are_what_fitting_each_head_alone_gives() -> None:
    clients = some_clients(t=60, noise=2.0)
    found = simulate(make, clients, "local", **{**WAY, "rounds": 1})
    members = torch.tensor([[1, 3], [0, 2], [2, 2], [1, 0]])
    own, both = ensemble_accuracy(found, clients, members, recipe=replace(RECIPE, epochs=4))
    assert torch.equal(own, found.accuracy)
    for pupil in range(4):
        answers = found.model(pupil)(clients.images[clients.test[pupil]]).softmax(1)
        for teacher in members[pupil].tolist():
            answers = answers + refitted(found, clients, pupil, teacher, 4)
        truth = clients.labels[clients.test[pupil]]
        assert both[pupil] == (answers.argmax(1) == truth).float().mean()
    with pytest.raises(ValueError, match="members 0 to 4 are named, of 4 clients"):
        ensemble_accuracy(found, clients, members + (members == 3))
    with pytest.raises(ValueError, match=r"\(4, k\), got torch.int64 \(2, 2\)"):
        ensemble_accuracy(found, clients, members[:2])


def test_ensembles_of_similar_clients_help() -> None:
    clients = some_clients(count=6, n=9, t=30)
    found = simulate(make, clients, "atoms", **{**WAY, "rounds": 3})
    members = most_similar(found.atoms().cosines(), 2)
    own, both = ensemble_accuracy(found, clients, members, recipe=replace(RECIPE, epochs=20))
    assert both.mean() >= own.mean()
