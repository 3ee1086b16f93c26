"""Clients that learn together through a server that sees no image, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...data.draws import derived
from ...models.atoms import atom_layers
from ...progress import Progress
from ..adversarial import Prepare, floats
from ..stack import State, made, state_of, without_numbers
from .clients import Clients
from .local import Local
from .methods import Method, Part, Phase, head_of, names_of, open_method
from .result import Federated
from .uploads import Receive, arrived, mean

AT_ONCE_ON_CPU = 20
AfterRound = Callable[[int, State], None]


def simulate(
    make: Callable[[], nn.Module],
    clients: Clients,
    method: str | Method = "atoms",
    *,
    rounds: int = 30,
    epochs: int = 5,
    share: float = 0.1,
    seed: int = 0,
    batch: int = 50,
    rate: float = 0.01,
    momentum: float = 0.9,
    decay: float = 0.0,
    optimiser: Literal["adam", "sgd"] = "sgd",
    prepare: Prepare | None = None,
    mixed: bool = False,
    head: str | Sequence[str] | None = None,
    same_atoms: bool = True,
    last: Part | None = None,
    last_epochs: int | None = None,
    measure_every: int = 0,
    at_once: int | None = None,
    receive: Receive | None = None,
    after_round: AfterRound | None = None,
) -> Federated:
    """Federated learning on the device where the images are; every client's model, and how well it does at the end.

    All start from `make()` under the global seed `seed`; parameters that do not require gradients there are never
    trained. In each round a `share` of the clients, the same for every method, train for `epochs` on their own images
    (SGD with Nesterov momentum as `fit` has it, started afresh) and the server takes the mean of what they share:
    that weighted by images, since all have equally many. `method`: a key of `METHODS`, with options as in
    "fedprox(mu=0.1)". `head`: names of the modules that are the head (None: the last linear layer).

    At the end every client trains once more, without sending anything, for `last_epochs` (None: `epochs`): the whole
    model for fedavg and fedprox (the paper's "with local finetuning"), what is its own for the others. `last`: another
    part to train then ("own": all but the coefficients, after which atoms can be compared).

    `same_atoms=False`: every client starts from atoms of its own, as a control. `measure_every`: rounds between two
    entries of the mean accuracy in the history (0: never). `at_once`: clients trained in one call (None: all, on a CPU
    20). An upload goes through `receive(round, client, upload)`; one with NaN or a wrong shape is dropped and named in
    the history, and that client's round is as if it had not been. `after_round(round, state)` sees every client's
    model, (clients, …), and -1 is before the first round.
    """
    way = open_method(method)
    if last is not None:
        way = replace(way, last=replace(way.last, trains=last))
    device = clients.images.device
    clients = clients.to(device)
    model = made(make, seed, device).eval()
    modules = head_of(model, head)
    _check(model, clients, prepare, rounds=rounds, epochs=epochs, share=share, batch=batch, rate=rate)
    size = at_once or (AT_ONCE_ON_CPU if device.type == "cpu" else len(clients))
    local = Local(clients, without_numbers(model), batch, rate, momentum, decay, optimiser, prepare, mixed, size, seed)
    server = _Server.of(way, model, modules, local, same_atoms)
    history: list[dict[str, Any]] = []
    count = round(share * len(clients))
    if after_round is not None:
        after_round(-1, server.state())
    with Progress(f"{way.name}: {count} of {len(clients)} clients a round", rounds + 1, "rounds") as bar:
        for turn in range(rounds):
            history.append(server.round(turn, _sampled(len(clients), count, seed, turn).to(device), epochs, receive))
            if measure_every and (turn + 1) % measure_every == 0:
                history[-1]["accuracy"] = float(local.accuracy(server.personal, server.shared).mean())
            if after_round is not None:
                after_round(turn, server.state())
            bar.advance()
        before, alone = local.accuracy(server.personal, server.shared), server.accuracy_alone()
        state, entry = server.finish(rounds, epochs if last_epochs is None else last_epochs)
        accuracy = local.accuracy(state, {})
        bar.advance()
    return Federated(
        method=way.name,
        state=state,
        shared=server.shared,
        accuracy=accuracy,
        before=before,
        global_accuracy=alone,
        history=[*history, {**entry, "accuracy": float(accuracy.mean())}],
        head=modules,
        template=model,
    )


@dataclass(eq=False)
class _Server:
    """The part that is shared, and beside it, for the simulation's sake, what every client keeps."""

    method: Method
    local: Local
    parts: dict[Part, set[str]]  # the names of each part that the method speaks of
    trainable: set[str]
    shared: State
    personal: State  # (clients, …)

    @staticmethod
    def of(method: Method, model: nn.Module, head: Sequence[str], local: Local, same_atoms: bool) -> _Server:
        phases = (*method.phases, method.last)
        spoken = {method.shared, method.personal, *(phase.trains for phase in phases)}
        parts = {part: names_of(part, model, head) for part in spoken}
        start = state_of(model)
        everyone = {name: t.expand(len(local.clients), *t.shape).clone() for name, t in start.items()
                    if name in parts[method.personal]}  # fmt: skip
        if not same_atoms:
            everyone |= _own_atoms(model, everyone, local.seed)
        return _Server(
            method,
            local,
            parts,
            {name for name, p in model.named_parameters() if p.requires_grad},
            {name: t.clone() for name, t in start.items() if name in parts[method.shared]},
            everyone,
        )

    def round(self, turn: int, who: Tensor, epochs: int, receive: Receive | None) -> dict[str, Any]:
        """Clients `who` train, send, and the server averages; what is to be remembered of it."""
        kept = {name: stacked[who] for name, stacked in self.personal.items()}
        visiting = {name: stacked for name, stacked in kept.items() if name not in self.shared}
        twice = len(visiting) < len(kept)  # a client has a model of its own beside the one that it sends
        for number, phase in enumerate(self.method.phases):
            if phase.kept and twice:
                kept = self._train(phase, who, kept, epochs, (turn, number))
            else:
                visiting = self._train(phase, who, visiting, epochs, (turn, number))
        sent = {name: visiting[name] for name in self.shared if name in visiting}
        kept = {name: (kept if twice else visiting)[name] for name in self.personal}
        uploads, good, dropped = arrived(turn, who.tolist(), sent, kept, receive)
        if good:
            self.shared |= {name: mean(stacked) for name, stacked in uploads.items()}
            for name, stacked in kept.items():
                self.personal[name][who[good]] = stacked[good]
        entry: dict[str, Any] = {"round": turn, "clients": who.tolist(), "dropped": dropped}
        return entry if good else {**entry, "note": "every client was dropped: the server keeps what it had"}

    def finish(self, turn: int, epochs: int) -> tuple[State, dict[str, Any]]:
        """Every client's model after a last training of its own, and what is to be remembered of it."""
        who = torch.arange(len(self.local.clients), device=self.local.clients.train.device)
        trained = self._train(self.method.last, who, self.personal, epochs, (turn, 0))
        _, good, dropped = arrived(turn, who.tolist(), {}, trained, None)
        before = self.state()
        state = {name: trained.get(name, stacked) for name, stacked in before.items()}
        for client in dropped:
            for name, stacked in trained.items():
                stacked[client] = before[name][client]
        return state, {"round": turn, "last": True, "clients": [int(who[k]) for k in good], "dropped": dropped}

    def state(self) -> State:
        """Every client's model, (clients, …); what is shared is in memory once."""
        count = len(self.local.clients)
        return {**{name: t.expand(count, *t.shape) for name, t in self.shared.items()}, **self.personal}

    def accuracy_alone(self) -> Tensor | None:
        """Of the server's model, where it has a whole one, on every client's test images."""
        if self.method.shared != "all":
            return None
        return self.local.accuracy({}, self.shared)

    def _train(self, phase: Phase, who: Tensor, own: State, epochs: int, when: tuple[int, int]) -> State:
        wanted = phase.epochs(epochs)
        if wanted < 0:
            raise ValueError(f"{self.method.name} leaves {wanted} of {epochs} epochs to train the {phase.trains}")
        trains = self.parts[phase.trains] & self.trainable
        return self.local.train(who, own, self.shared, trains=trains, epochs=wanted, when=when, pull=phase.pull)


def _sampled(clients: int, count: int, seed: int, turn: int) -> Tensor:
    """Who takes part in a round: the same for every method."""
    generator = torch.Generator().manual_seed(int(derived(derived(seed, turn), -1)))
    return torch.randperm(clients, generator=generator)[:count].sort().values


def _own_atoms(model: nn.Module, personal: State, seed: int) -> State:
    """Random atoms for each client, as large as those of the model."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in atom_layers(model):
        name = f"{layer}.atoms" if layer else "atoms"
        if name not in personal:
            raise ValueError(f"same_atoms=False: {name} is shared by all clients under this method")
        first = personal[name]
        size = float(first.square().mean().sqrt())
        found[name] = (size * torch.randn(first.shape, generator=generator)).to(first)
    if not found:
        raise ValueError("same_atoms=False: the model has no layer of atoms")
    return found


@torch.no_grad()
def _check(
    model: nn.Module, clients: Clients, prepare: Prepare | None, *, share: float, rate: float, **counts: int
) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if name == "rounds" else 1):
            raise ValueError(f"{name}={value!r}: a whole number of at least {0 if name == 'rounds' else 1}")
    if not 0 < share <= 1 or round(share * len(clients)) < 1:
        least = math.ceil(1000 / len(clients)) / 1000
        raise ValueError(
            f"share={share} of {len(clients)} clients is {share * len(clients):g} of them: nobody would take part; "
            f"a share is at most 1 and here at least {least:g}"
        )
    if not rate > 0:
        raise ValueError(f"rate={rate}: a number above 0")
    x = floats(clients.images[:1])
    answer = model(prepare(x) if prepare else x)
    if not isinstance(answer, Tensor) or answer.ndim != 2:
        raise ValueError(f"the model must answer (n, classes), got {getattr(answer, 'shape', type(answer).__name__)}")
    used = torch.cat([clients.train.flatten(), clients.test.flatten()])
    largest = int(clients.labels[used].max())
    if largest >= answer.shape[1]:
        raise ValueError(
            f"labels go up to {largest}, but the model answers {answer.shape[1]} classes: make it with at least "
            f"{largest + 1}"
        )
