"""Simulated federated learning: clients learn together through a server that sees no image, in one process."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ...checks import check_options, nearest, one_of, parse_call, whole_number
from ...data.draws import derived
from ...files import read_tensors, reading, write_tensors
from ...models import atom_layers
from ...progress import Progress
from ...stats import AtomTable
from ..heads import Heads, features, find_head, refit_head
from ..many_networks import GROUP, Stack, State, build, network, orders, seeded, state_of, without_numbers
from ..recipe import Prepare, Recipe, floats
from .clients import Clients

# Methods, each a declaration: what is shared, what each client keeps, and who trains what

# head: the last layer; body: all but the head; coefficients: of layers of atoms; own: all but the coefficients.
Part = Literal["all", "none", "head", "body", "coefficients", "own"]


@dataclass(frozen=True)
class Phase:
    """A part of a client's training between receiving the shared part and sending it back."""

    trains: Part
    pull: float = 0.0  # w of w/2 ‖θ − θ_server‖², added to the loss
    kept: bool = False  # train the copy that the client keeps, if it has one beside the copy that it sends
    epochs: Callable[[int], int] = field(default=lambda epochs: epochs)  # how many of a round's epochs


@dataclass(frozen=True)
class Method:
    """What the server averages, what each client keeps, and how a client trains; `last`: before it is tested.

    `last_epochs`: the length of that last training, None: that of a round. `same_atoms=False`: every client starts from
    its own atoms, as a control.
    """

    name: str
    shared: Part
    personal: Part
    phases: tuple[Phase, ...]
    last: Phase
    last_epochs: int | None = None
    same_atoms: bool = True


METHODS: dict[str, Callable[..., Method]] = {
    # One model for all, averaged; tested after a last local training (McMahan et al. 2017).
    "fedavg": lambda: Method("fedavg", "all", "none", (Phase("all"),), Phase("all")),
    # As fedavg, with each client pulled to the server's model by μ/2 ‖θ − θ_server‖² (Li et al. 2020).
    "fedprox": lambda mu=0.01: Method("fedprox", "all", "none", (Phase("all", pull=mu),), Phase("all")),
    # Each client has its own last layer (Arivazhagan et al. 2019).
    "fedper": lambda: Method("fedper", "body", "head", (Phase("all"),), Phase("head")),
    # As fedper, but the head trains first, then the body, in the last `body_epochs` (Collins et al. 2021).
    "fedrep": lambda body_epochs=1: Method(
        "fedrep",
        "body",
        "head",
        (Phase("head", epochs=lambda epochs: epochs - body_epochs), Phase("body", epochs=lambda _: body_epochs)),
        Phase("head"),
    ),
    # fedavg, and for each client a second model, pulled to the server's by λ/2 ‖θ − θ_server‖² (Li et al. 2021).
    "ditto": lambda lam=0.1: Method(
        "ditto", "all", "all", (Phase("all"), Phase("all", pull=lam, kept=True)), Phase("all", pull=lam, kept=True)
    ),
    # Only the start is shared.
    "local": lambda: Method("local", "none", "all", (Phase("all"),), Phase("all")),
    # Coefficients are averaged; each client has its own atoms, biases and head ("evolving" coefficients).
    "atoms": lambda: Method("atoms", "coefficients", "own", (Phase("all"),), Phase("own")),
}
COMMON = ("last", "last_epochs", "same_atoms")  # options of every method


def open_method(spec: str | Method) -> Method:
    """Open "fedavg" or "fedprox(mu=0.1)"; every method has the options `last`, `last_epochs` and `same_atoms`."""
    if isinstance(spec, Method):
        return spec
    name, options = parse_call(spec)
    one_of(name, "method", METHODS)
    check_options(options, [*inspect.signature(METHODS[name]).parameters, *COMMON], name)
    common = {key: options.pop(key) for key in COMMON if key in options}
    method = METHODS[name](**options)
    if common.get("last") is not None:
        common["last"] = replace(method.last, trains=common["last"])
    return replace(method, **common)


def head_of(model: nn.Module, head: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of the head's modules: `head`, or else the last linear layer."""
    if head is None:
        return (find_head(model),)
    names = (head,) if isinstance(head, str) else tuple(head)
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise ValueError(f"the model has no module {name!r} to be its head{nearest(name, modules)}")
    return names


def names_of(part: Part, model: nn.Module, head: Sequence[str]) -> set[str]:
    """The names of the parameters and buffers of a part of a model."""
    every = set(state_of(model))
    one_of(part, "the part of a model", get_args(Part))
    if part in ("all", "none"):
        return every if part == "all" else set()
    if part in ("head", "body"):
        chosen = {name for name in every if any(not module or name.startswith(f"{module}.") for module in head)}
        return chosen if part == "head" else every - chosen
    layers = atom_layers(model)
    if not layers:
        raise ValueError(f"only models made of atoms have a part {part!r}: alexnet(atoms=9) or with_atoms(model, 9)")
    chosen = {parameter_name(layer, "coefficients") for layer in layers} & every
    return chosen if part == "coefficients" else every - chosen


KIND, VERSION = "federated", 2
_VALUES = ("accuracy", "before", "global_accuracy")


@dataclass(frozen=True, eq=False)
class Federated:
    """The result of federated learning: every client's model, its accuracy, and the history of the rounds."""

    method: str
    state: State = field(repr=False)  # every client's model at the end, (clients, …); what is shared is expanded
    shared: State = field(repr=False)  # the server's part
    accuracy: Tensor = field(repr=False)  # (clients,) on their own test images, at the end
    before: Tensor = field(repr=False)  # (clients,) before the last local training
    global_accuracy: Tensor | None = field(repr=False)  # of the server's model alone, if it has a whole one
    history: list[dict[str, Any]] = field(repr=False)  # one entry per round: who took part, who was dropped and why
    head: tuple[str, ...]  # modules
    template: nn.Module = field(repr=False)  # the model they all started from

    def __len__(self) -> int:
        return len(self.accuracy)

    def model(self, client: int) -> nn.Module:
        """A client's model, in evaluation mode."""
        return network(self.template, self.state, client)

    def atoms(self, *, require_shared: bool = True) -> AtomTable:
        """The atoms of all clients, to compare all pairs; raises if their coefficients differ."""
        layers = atom_layers(self.template)
        if not layers:
            raise ValueError("the clients' models have no layer of atoms")
        for layer in layers if require_shared else ():
            coefficients = self.state[parameter_name(layer, "coefficients")]
            if coefficients.stride(0) and not bool((coefficients == coefficients[:1]).all()):
                raise ValueError(
                    f"{layer}: the clients' coefficients differ, so a cosine of their atoms has no meaning; end with "
                    "simulate(…, \"fedavg(last='own')\"), freeze the coefficients, or set require_shared=False"
                )
        # In float64: early in training cosines are 1 up to the last digits of float32.
        stacked = {layer: self.state[parameter_name(layer, "atoms")].cpu() for layer in layers}
        return AtomTable.stacked(stacked, dtype=torch.float64)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a safetensors file, which `Federated.load` reads."""
        tensors = {f"shared/{name}": t for name, t in self.shared.items()}
        for name, t in self.state.items():
            # What all clients share is written once.
            tensors[f"{'state' if t.stride(0) else 'common'}/{name}"] = t if t.stride(0) else t[0]
        tensors |= {name: t for name in _VALUES if (t := getattr(self, name)) is not None}
        about = {"method": self.method, "history": self.history, "head": self.head}
        return write_tensors(path, KIND, VERSION, tensors, {"about": json.dumps(about)})

    @staticmethod
    def load(path: str | os.PathLike[str], make: Callable[[], nn.Module]) -> Federated:
        """Read what `save` wrote; `make` is the function that made the clients' model."""
        text, tensors = read_tensors(path, KIND, VERSION, "federated learning")
        with torch.random.fork_rng(devices=[]):
            template = make().eval()
        with reading(path):
            about, count = json.loads(text["about"]), len(tensors["accuracy"])
            method, head, history = str(about["method"]), tuple(about["head"]), list(about["history"])
            for entry in history:
                entry["dropped"] = {int(client): reason for client, reason in entry["dropped"].items()}
        state = _under("state", tensors)
        state |= {name: t.expand(count, *t.shape) for name, t in _under("common", tensors).items()}
        for name, t in state_of(template).items():
            if name not in state or state[name].shape[1:] != t.shape:
                shape = tuple(state[name].shape[1:]) if name in state else "missing"
                raise ValueError(f"{path} is of another model: {name} is {shape}, make() has {tuple(t.shape)}")
        values: dict[str, Any] = {name: tensors.get(name) for name in _VALUES}
        shared = _under("shared", tensors)
        return Federated(method, state, shared, **values, history=history, head=head, template=template)


def _under(folder: str, tensors: dict[str, Tensor]) -> State:
    return {key.removeprefix(f"{folder}/"): t for key, t in tensors.items() if key.startswith(f"{folder}/")}


def parameter_name(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


# Uploads, and what the server makes of them

Receive = Callable[[int, int, State], Mapping[str, Tensor]]  # (round, client, upload) → the upload as it arrives


def receive_uploads(
    turn: int, who: Sequence[int], sent: State, kept: State, receive: Receive | None
) -> tuple[State, list[int], dict[int, str]]:
    """The valid uploads, the places of their clients in `who`, and why others are dropped.

    A client that diverged, so that a part it keeps (in `kept`) is not finite, is dropped too.
    """
    misfits: dict[int, str] = {}
    if receive is not None:
        uploads = []
        for k, client in enumerate(who):
            expected = {name: stacked[k] for name, stacked in sent.items()}
            upload = receive(turn, client, {name: t.clone() for name, t in expected.items()})
            if (wrong := _misfit(upload, expected)) is not None:
                misfits[client], upload = wrong, expected
            # In the server's type, in which a large number of double precision is infinite.
            uploads.append({name: upload[name].detach().to(t) for name, t in expected.items()})
        sent = {name: torch.stack([upload[name] for upload in uploads]) for name in sent}
    dropped = {**_not_finite(who, kept), **_not_finite(who, sent), **misfits}
    good = [k for k, client in enumerate(who) if client not in dropped]
    if len(good) < len(who):
        sent = {name: stacked[good] for name, stacked in sent.items()} if good else {}
    return sent, good, dropped


def mean(stacked: Tensor) -> Tensor:
    """The mean over clients; whole numbers (counts of batches) are rounded."""
    exact = stacked.mean(0, dtype=torch.float64)  # the float32 mean of equal numbers need not be that number
    return (exact if stacked.is_floating_point() else exact.round()).to(stacked.dtype)


def _not_finite(who: Sequence[int], state: State) -> dict[int, str]:
    """The first name with NaN or infinite values, for each client that has one."""
    if not state:
        return {}
    rows = [stacked.reshape(len(who), -1) for stacked in state.values()]  # a batch norm's count is one per client
    finite = torch.stack([torch.isfinite(row).all(1) for row in rows])  # (names, clients)
    return {
        client: f"{list(state)[good.index(False)]} has values that are NaN or infinite"
        for client, good in zip(who, finite.T.tolist(), strict=True)
        if not all(good)
    }


def _misfit(upload: Any, expected: State) -> str | None:
    """The fault in the names, shapes and types of an upload, or None."""
    if not isinstance(upload, Mapping):
        return f"the upload is a {type(upload).__name__}, not tensors by name"
    if missing := [name for name in expected if name not in upload]:
        return f"{missing[0]} is missing"
    if more := [name for name in upload if name not in expected]:
        return f"the server does not share {more[0]}"
    for name, tensor in upload.items():
        if not isinstance(tensor, Tensor):
            return f"{name} is a {type(tensor).__name__}, not a tensor"
        if tensor.shape != expected[name].shape:
            return f"{name} is {tuple(tensor.shape)}, the server has {tuple(expected[name].shape)}"
        if tensor.is_meta or tensor.is_complex() or tensor.layout != torch.strided:
            return f"{name} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot be averaged"
    return None


TESTED_AT_ONCE = 5000  # images in one forward pass
RECIPE = Recipe(epochs=5, batch=50, rate=0.01, optimiser="sgd", schedule="constant")
AfterRound = Callable[[int, State], None]


def simulate(
    make: Callable[[], nn.Module],
    clients: Clients,
    method: str | Method = "atoms",
    *,
    recipe: Recipe = RECIPE,
    rounds: int = 30,
    share: float = 0.1,
    seed: int = 0,
    head: str | Sequence[str] | None = None,
    measure_every: int = 0,
    at_once: int | None = None,
    receive: Receive | None = None,
    after_round: AfterRound | None = None,
) -> Federated:
    """Simulate federated learning on the images' device; returns every client's model and its accuracy at the end.

    All start from `make()` under the global seed `seed`; parameters that do not require gradients there never train. In
    each round a `share` of the clients, the same for every method, train by `recipe` on their own images with a new
    optimiser, and the server takes the mean of what they share (also weighted by images, since all clients have equally
    many). `method`: a key of `METHODS`, with options as in "fedprox(mu=0.1)". `head`: names of the modules of the head
    (None: the last linear layer).

    At the end every client trains once more without sending anything: the whole model for fedavg and fedprox (the
    paper's "with local finetuning"), the parts that it keeps for the others. Options of every method change this:
    `last_epochs` (None: as in a round), and `last`, another part to train ("atoms(last='own')": all but the
    coefficients, after which atoms can be compared). "local(same_atoms=False)": every client starts from its own atoms,
    as a control.

    `measure_every`: rounds between two entries of the mean accuracy in the history (0: never). `at_once`: clients
    trained in one call (None: all, on a CPU 20). Each upload passes through `receive(round, client, upload)`; one with
    NaN or a wrong shape is dropped and named in the history, as if that client had not taken part. `after_round(round,
    state)` is called with every client's model, (clients, …), also before the first round, with round -1.
    """
    method = open_method(method)
    recipe.refuse("simulate", "clip", "average", "attack", "augment", "compiled")
    device = clients.images.device
    clients = clients.to(device)
    model = build(make, seed, device).eval()
    modules = head_of(model, head)
    whole_number(rounds, "rounds", least=0)
    _check(model, clients, recipe, share)
    size = at_once or (GROUP if device.type == "cpu" else len(clients))
    server = Server(method, model, modules, clients, recipe, size, seed)
    history: list[dict[str, Any]] = []
    count = round(share * len(clients))
    if after_round is not None:
        after_round(-1, server.state())
    with Progress(f"{method.name}: {count} of {len(clients)} clients a round", rounds + 1, "rounds") as bar:
        for turn in range(rounds):
            draws = torch.Generator().manual_seed(int(derived(derived(seed, turn), -1)))  # the same for every method
            who = torch.randperm(len(clients), generator=draws)[:count].sort().values
            history.append(server.round(turn, who.to(device), receive))
            if measure_every and (turn + 1) % measure_every == 0:
                history[-1]["accuracy"] = float(server.accuracy(server.personal, server.shared).mean())
            if after_round is not None:
                after_round(turn, server.state())
            bar.advance()
        before = server.accuracy(server.personal, server.shared)
        alone = server.accuracy({}, server.shared) if method.shared == "all" else None
        state, entry = server.finish(rounds)
        accuracy = server.accuracy(state, {})
        bar.advance()
    return Federated(
        method=method.name,
        state=state,
        shared=server.shared,
        accuracy=accuracy,
        before=before,
        global_accuracy=alone,
        history=[*history, {**entry, "accuracy": float(accuracy.mean())}],
        head=modules,
        template=model,
    )


class Server:
    """The shared part of the model, and (in a simulation) what every client keeps and how it trains."""

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        head: Sequence[str],
        clients: Clients,
        recipe: Recipe,
        at_once: int,
        seed: int,
    ) -> None:
        self.method, self.clients, self.recipe, self.at_once, self.seed = method, clients, recipe, at_once, seed
        self.template = without_numbers(model)
        parts = {method.shared, method.personal, *(phase.trains for phase in (*method.phases, method.last))}
        self.parts = {part: names_of(part, model, head) for part in parts}
        self.trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        start = state_of(model)
        self.shared = {name: t.clone() for name, t in start.items() if name in self.parts[method.shared]}
        kept = {name: t for name, t in start.items() if name in self.parts[method.personal]}
        self.personal = {name: t.expand(len(clients), *t.shape).clone() for name, t in kept.items()}  # (clients, …)
        if not method.same_atoms:
            self.personal |= _own_atoms(model, self.personal, seed)

    def round(self, turn: int, who: Tensor, receive: Receive | None) -> dict[str, Any]:
        """Let clients `who` train and send, and average what they sent; returns the entry for the history."""
        kept = {name: stacked[who] for name, stacked in self.personal.items()}
        visiting = {name: stacked for name, stacked in kept.items() if name not in self.shared}
        twice = len(visiting) < len(kept)  # a client has a second model beside the one that it sends
        for number, phase in enumerate(self.method.phases):
            if phase.kept and twice:
                kept = self.train(phase, who, kept, (turn, number))
            else:
                visiting = self.train(phase, who, visiting, (turn, number))
        sent = {name: visiting[name] for name in self.shared if name in visiting}
        kept = {name: (kept if twice else visiting)[name] for name in self.personal}
        uploads, good, dropped = receive_uploads(turn, who.tolist(), sent, kept, receive)
        if good:
            self.shared |= {name: mean(stacked) for name, stacked in uploads.items()}
            for name, stacked in kept.items():
                self.personal[name][who[good]] = stacked[good]
        entry: dict[str, Any] = {"round": turn, "clients": who.tolist(), "dropped": dropped}
        return entry if good else {**entry, "note": "every client was dropped: the server keeps what it had"}

    def finish(self, turn: int) -> tuple[State, dict[str, Any]]:
        """Every client's model after a last local training, and the entry for the history."""
        who = torch.arange(len(self.clients), device=self.clients.train.device)
        trained = self.train(self.method.last, who, self.personal, (turn, 0), self.method.last_epochs)
        dropped = _not_finite(who.tolist(), trained)
        before = self.state()
        state = {name: trained.get(name, stacked) for name, stacked in before.items()}
        for client in dropped:
            for name, stacked in trained.items():
                stacked[client] = before[name][client]
        good = [client for client in who.tolist() if client not in dropped]
        return state, {"round": turn, "last": True, "clients": good, "dropped": dropped}

    def state(self) -> State:
        """Every client's model, (clients, …); what is shared is in memory once."""
        count = len(self.clients)
        return {**{name: t.expand(count, *t.shape) for name, t in self.shared.items()}, **self.personal}

    def train(self, phase: Phase, who: Tensor, own: State, when: tuple[int, int], epochs: int | None = None) -> State:
        """Train clients `who` for a phase; returns all of `own` and what was trained, (clients, …).

        They start from `own` (clients, …) and for the rest from the shared part, to which they may be pulled. `when`:
        the numbers of the round and of the phase, which decide the order of the images.
        """
        of_round = self.recipe.epochs if epochs is None else epochs
        count = phase.epochs(of_round)
        if count < 0:
            raise ValueError(f"{self.method.name} leaves {count} of {of_round} epochs to train the {phase.trains}")
        if not count:
            return own
        recipe, trains = replace(self.recipe, epochs=count), self.parts[phase.trains] & self.trainable
        pull = (phase.pull, self.shared) if phase.pull else None
        parts = []
        for group, members in self._groups(who, own):
            stack = Stack(self.template, members, self.shared, count=len(group), trains=trains, mixed=recipe.mixed)
            if stack.trained:
                images = self.clients.train[group]
                seeds = [order_seed(self.seed, *when, client) for client in group.tolist()]
                optimiser = recipe.make_optimiser(stack.trained.values(), fused=True)
                schedule = recipe.make_schedule(optimiser, recipe.steps(images.shape[1]))
                with seeded(seeds[0], images.device):  # dropout draws from torch's own generators
                    for index in orders(seeds, images.shape[1], count, recipe.batch, images.device):
                        numbers = images.gather(1, index)
                        stack.learn(self._inputs(numbers), self.clients.labels[numbers], optimiser, pull)
                        schedule.step()
            parts.append({**members, **stack.state()})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]

    @torch.no_grad()
    def accuracy(self, own: State, shared: State) -> Tensor:
        """The accuracy of every client on its own test images: (clients,)."""
        right = []
        for test, members in self._groups(self.clients.test, own):
            stack = Stack(self.template, members, shared, count=len(test), trains=())
            parts = test.split(max(1, TESTED_AT_ONCE // len(test)), dim=1)
            answers = torch.cat([stack.answers(self._inputs(numbers)).argmax(2) for numbers in parts], dim=1)
            right.append((answers == self.clients.labels[test]).sum(1))
        return torch.cat(right).float() / self.clients.test.shape[1]

    def _groups(self, who: Tensor, own: State) -> Iterator[tuple[Tensor, State]]:
        """Groups of `at_once` clients, with the parts that they keep."""
        for start in range(0, len(who), self.at_once):
            group = slice(start, start + self.at_once)
            yield who[group], {name: stacked[group] for name, stacked in own.items()}

    def _inputs(self, numbers: Tensor) -> Tensor:
        """Images (clients, n, …) as the networks take them."""
        return floats(self.clients.images[numbers.flatten()], self.recipe.prepare).unflatten(0, numbers.shape)


def order_seed(seed: int, turn: int, phase: int, client: int) -> int:
    """The seed of the order of a client's images, as `fit` takes it."""
    return int(derived(derived(derived(seed, turn), phase), client))


def _own_atoms(model: nn.Module, personal: State, seed: int) -> State:
    """Random atoms for each client, of the size of the model's."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for layer in atom_layers(model):
        name = parameter_name(layer, "atoms")
        if name not in personal:
            raise ValueError(f"same_atoms=False: {name} is shared by all clients under this method")
        first = personal[name]
        size = float(first.square().mean().sqrt())
        result[name] = (size * torch.randn(first.shape, generator=generator)).to(first)
    if not result:
        raise ValueError("same_atoms=False: the model has no layer of atoms")
    return result


@torch.no_grad()
def _check(model: nn.Module, clients: Clients, recipe: Recipe, share: float) -> None:
    if not 0 < share <= 1 or round(share * len(clients)) < 1:
        least = math.ceil(1000 / len(clients)) / 1000
        raise ValueError(
            f"share={share} of {len(clients)} clients is {share * len(clients):g} of them, so nobody would take part: "
            f"a share is at most 1 and here at least {least:g}"
        )
    answer = model(floats(clients.images[:1], recipe.prepare))
    if not isinstance(answer, Tensor) or answer.ndim != 2:
        raise ValueError(f"the model must answer (n, classes), got {getattr(answer, 'shape', type(answer).__name__)}")
    used = torch.cat([clients.train.flatten(), clients.test.flatten()])
    largest = int(clients.labels[used].max())
    if largest >= answer.shape[1]:
        raise ValueError(
            f"labels go up to {largest}, but the model answers {answer.shape[1]} classes: make it with at least "
            f"{largest + 1}"
        )


# Ensembles: the bodies of a few other clients, with a last layer fitted to the client's own images

HEAD_RECIPE = Recipe(epochs=100, batch=50, rate=0.01, optimiser="sgd", schedule="constant")


def ensemble_accuracy(
    result: Federated,
    clients: Clients,
    members: Tensor,
    *,
    recipe: Recipe = HEAD_RECIPE,
    seed: int = 0,
    prepare: Prepare | None = None,
    at_once: int = 2000,
) -> tuple[Tensor, Tensor]:
    """The accuracy of each client's model alone, and with the models of others: two tensors (clients,).

    `members` (clients, k) are the numbers of the clients whose models each one uses. A member's last linear layer is
    trained further, by `recipe`, on the client's images; its body does not change (features are computed once,
    `at_once` images in a pass). Then the softmax answers of the client's model, which does not change, and of its k
    members are averaged. As a control, use random members, or each client as its own member.
    """
    if len(clients) != len(result):
        raise ValueError(f"got models of {len(result)} clients, but images of {len(clients)}")
    if members.ndim != 2 or len(members) != len(clients) or not members.shape[1] or members.is_floating_point():
        raise ValueError(f"need numbers of clients ({len(clients)}, k), got {members.dtype} {tuple(members.shape)}")
    if int(members.min()) < 0 or int(members.max()) >= len(clients):
        raise ValueError(f"members {int(members.min())} to {int(members.max())} are named, of {len(clients)} clients")
    head = result.template.get_submodule(result.head[0])
    if len(result.head) > 1 or not isinstance(head, nn.Linear):
        raise ValueError(f"the head is {', '.join(result.head)}: need one linear layer that can be fitted again")
    device = result.accuracy.device
    clients, members = clients.to(device), members.to(device)
    pupils = torch.arange(len(clients), device=device).repeat_interleave(members.shape[1])
    teachers = members.flatten()
    n, t = clients.train.shape[1], clients.test.shape[1]
    images = torch.cat([clients.train, clients.test], dim=1)
    inputs: dict[int, Tensor] = {}  # of the head, for each pair's training and test images
    answers = []  # of each client's model to its test images
    for teacher in range(len(clients)):
        pairs = (teachers == teacher).nonzero().flatten()
        numbers = torch.cat([clients.test[teacher], images[pupils[pairs]].flatten()])
        model = result.model(teacher)
        entered = features(model, clients.images[numbers], head=result.head[0], prepare=prepare, batch=at_once)
        with torch.no_grad():
            answers.append(model.get_submodule(result.head[0])(entered[:t]))
        inputs |= dict(zip(pairs.tolist(), entered[t:].unflatten(0, (len(pairs), n + t)), strict=True))
    stacked = torch.stack([inputs[pair] for pair in range(len(teachers))])
    weight = result.state[parameter_name(result.head[0], "weight")][teachers]
    bias = weight.new_zeros(weight.shape[:2])
    if head.bias is not None:
        bias = result.state[parameter_name(result.head[0], "bias")][teachers]
    seeds = [order_seed(seed, 0, 0, pupil) for pupil in pupils.tolist()]  # one order for all members of a client
    labels = clients.labels[clients.train[pupils]]
    heads = refit_head(stacked[:, :n], labels, weight.shape[1], recipe=recipe, start=Heads(weight, bias), seed=seeds)
    own, others = torch.stack(answers), heads(stacked[:, n:]).softmax(2).unflatten(0, members.shape).sum(1)
    truth = clients.labels[clients.test]
    both = (own.softmax(2) + others).argmax(2)
    return (own.argmax(2) == truth).float().mean(1), (both == truth).float().mean(1)
