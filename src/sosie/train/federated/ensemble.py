"""Clients that ask others: the bodies of a few members, with a last layer fitted to the client's own images."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..heads import Heads, refit_head
from ..step import Prepare, floats
from ..together import State
from .clients import Clients, order_seed
from .simulation import Federated


class Ensemble(NamedTuple):
    """Accuracy of each client's model, and of the mean answer of it and its members: (clients,) each."""

    own: Tensor
    ensemble: Tensor


@torch.no_grad()
def ensemble_accuracy(
    found: Federated,
    clients: Clients,
    members: Tensor,
    *,
    epochs: int = 100,
    batch: int = 50,
    rate: float = 0.01,
    momentum: float = 0.9,
    seed: int = 0,
    prepare: Prepare | None = None,
    at_once: int = 2000,
) -> Ensemble:
    """Let every client use the models of others, `members` (clients, k): numbers of clients.

    A member's last linear layer is trained further on the client's own images, its body is left as it is (features are
    computed once, `at_once` images in a pass); then the softmax answers of the client's model, which is not touched,
    and of its k members are averaged. As a control, try members at random, or each client as its own member.
    """
    clients = clients.to(found.accuracy.device)
    members = _checked(members, clients, found).to(found.accuracy.device)
    pupils = torch.arange(len(clients), device=members.device).repeat_interleave(members.shape[1])
    teachers = members.flatten()
    head = _module(found)
    train, test, own = _features(found, clients, pupils, teachers, prepare, at_once)
    labels = clients.labels[clients.train[pupils]]
    where = f"{found.head[0]}." if found.head[0] else ""
    weight = found.state[f"{where}weight"][teachers]
    bias = weight.new_zeros(weight.shape[:2]) if head.bias is None else found.state[f"{where}bias"][teachers]
    with torch.enable_grad():
        heads = refit_head(
            train,
            labels,
            weight.shape[1],
            start=Heads(weight, bias),
            epochs=epochs,
            # A client's members see its images in one order.
            seed=[order_seed(seed, 0, 0, pupil) for pupil in pupils.tolist()],
            batch=batch,
            rate=rate,
            optimiser="sgd",
            momentum=momentum,
            schedule="constant",
        )
    theirs = heads(test).softmax(2).unflatten(0, members.shape).sum(1)
    truth = clients.labels[clients.test]
    both = (own.softmax(2) + theirs).argmax(2)
    return Ensemble((own.argmax(2) == truth).float().mean(1), (both == truth).float().mean(1))


def _features(
    found: Federated, clients: Clients, pupils: Tensor, teachers: Tensor, prepare: Prepare | None, at_once: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What enters the head, of each pair's training and test images; what clients answer to their test images."""
    n, t = clients.train.shape[1], clients.test.shape[1]
    images = torch.cat([clients.train, clients.test], dim=1)
    features: dict[int, Tensor] = {}
    answers = []
    for teacher in range(len(clients)):
        pairs = (teachers == teacher).nonzero().flatten()
        numbers = torch.cat([clients.test[teacher], images[pupils[pairs]].flatten()])
        state = {name: stacked[teacher] for name, stacked in found.state.items()}
        entered, said = _run(found, state, clients.images, numbers.split(at_once), prepare)
        answers.append(said[:t])
        features |= dict(zip(pairs.tolist(), entered[t:].unflatten(0, (len(pairs), n + t)), strict=True))
    stacked = torch.stack([features[pair] for pair in range(len(teachers))])
    return stacked[:, :n], stacked[:, n:], torch.stack(answers)


def _run(
    found: Federated, state: State, images: Tensor, parts: tuple[Tensor, ...], prepare: Prepare | None
) -> tuple[Tensor, Tensor]:
    """What enters the head, and what the model answers."""
    entered: list[Tensor] = []
    said = []
    hook = _module(found).register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    try:
        for numbers in parts:
            x = floats(images[numbers])
            said.append(functional_call(found.template, state, (prepare(x) if prepare else x,)))
    finally:
        hook.remove()
    if len(entered) != len(parts) or entered[0].ndim != 2:
        raise ValueError(f"{found.head[0]} must be called once, with (n, features), to be fitted again")
    return torch.cat(entered), torch.cat(said)


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
