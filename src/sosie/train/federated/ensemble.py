"""Clients that ask others: the bodies of a few members, with a last layer fitted to the client's own images."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..heads import Heads, features, refit_head
from ..recipe import Prepare, Recipe
from .clients import Clients
from .simulation import Federated, order_seed

RECIPE = Recipe(epochs=100, batch=50, rate=0.01, optimiser="sgd", schedule="constant")


class Ensemble(NamedTuple):
    """Accuracy of each client's model, and of the mean answer of it and its members: (clients,) each."""

    own: Tensor
    ensemble: Tensor


def ensemble_accuracy(
    found: Federated,
    clients: Clients,
    members: Tensor,
    *,
    recipe: Recipe = RECIPE,
    seed: int = 0,
    prepare: Prepare | None = None,
    at_once: int = 2000,
) -> Ensemble:
    """Let every client use the models of others, `members` (clients, k): numbers of clients.

    A member's last linear layer is trained further, by `recipe`, on the client's own images; its body is left as it is
    (features are computed once, `at_once` images in a pass); then the softmax answers of the client's model, which is
    not touched, and of its k members are averaged. As a control, try members at random, or each client as its own
    member.
    """
    device = found.accuracy.device
    clients, members = clients.to(device), _checked(members, clients, found).to(device)
    pupils = torch.arange(len(clients), device=device).repeat_interleave(members.shape[1])
    teachers = members.flatten()
    head = _module(found)
    n, t = clients.train.shape[1], clients.test.shape[1]
    images = torch.cat([clients.train, clients.test], dim=1)
    entered: dict[int, Tensor] = {}  # what reaches the head, of each pair's training and test images
    answers = []  # what each client's own model says to its test images
    for teacher in range(len(clients)):
        pairs = (teachers == teacher).nonzero().flatten()
        numbers = torch.cat([clients.test[teacher], images[pupils[pairs]].flatten()])
        model = found.model(teacher)
        seen = features(model, clients.images[numbers], head=found.head[0], prepare=prepare, batch=at_once)
        with torch.no_grad():
            answers.append(model.get_submodule(found.head[0])(seen[:t]))
        entered |= dict(zip(pairs.tolist(), seen[t:].unflatten(0, (len(pairs), n + t)), strict=True))
    stacked = torch.stack([entered[pair] for pair in range(len(teachers))])
    where = f"{found.head[0]}." if found.head[0] else ""
    weight = found.state[f"{where}weight"][teachers]
    bias = weight.new_zeros(weight.shape[:2]) if head.bias is None else found.state[f"{where}bias"][teachers]
    orders = [order_seed(seed, 0, 0, pupil) for pupil in pupils.tolist()]  # a client's members see its images in one
    labels = clients.labels[clients.train[pupils]]
    heads = refit_head(
        stacked[:, :n], labels, weight.shape[1], recipe=recipe, start=Heads(weight, bias), seed=orders
    )  # fmt: skip
    own, theirs = torch.stack(answers), heads(stacked[:, n:]).softmax(2).unflatten(0, members.shape).sum(1)
    truth = clients.labels[clients.test]
    both = (own.softmax(2) + theirs).argmax(2)
    return Ensemble((own.argmax(2) == truth).float().mean(1), (both == truth).float().mean(1))


def _module(found: Federated) -> nn.Linear:
    module = found.template.get_submodule(found.head[0])
    if len(found.head) > 1 or not isinstance(module, nn.Linear):
        raise ValueError(f"the head is {', '.join(found.head)}: need one linear layer that can be fitted again")
    return module


def _checked(members: Tensor, clients: Clients, found: Federated) -> Tensor:
    if len(clients) != len(found):
        raise ValueError(f"models of {len(found)} clients, images of {len(clients)}")
    if members.ndim != 2 or len(members) != len(clients) or not members.shape[1] or members.is_floating_point():
        raise ValueError(
            f"members are numbers of clients, ({len(clients)}, k), got {members.dtype} {tuple(members.shape)}"
        )
    if int(members.min()) < 0 or int(members.max()) >= len(clients):
        raise ValueError(f"members {int(members.min())} to {int(members.max())} are named, of {len(clients)} clients")
    return members
