"""Flower (flwr) with filter atoms: the server averages coefficients, everything else stays with the client.

The server runs `AtomStrategy` in place of `FedAvg`. A client makes its model, `recall`s its own parts, `receive`s the
coefficients, trains, `keep`s its own parts in its context and answers with `upload`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...models import atom_layers
from ...models.atoms import some_atom_layers
from ...stats import AtomTable
from .simulation import parameter_name

# flwr reports its use to its makers unless this is 0 when it is imported; who has set it has decided already.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
except ImportError as error:
    raise ImportError("sosie.train.federated.flower needs flwr: pip install 'sosie[flower]'") from error

COEFFICIENTS, ATOMS = "coefficients", "atoms"
PERSONAL = "sosie-personal"  # where a client's context has its own parts
REPORT = "report-atoms"  # in the configuration that goes with the coefficients: whether to send the atoms too
MOST_EXAMPLES = 2**53  # beyond this a float does not count
log = logging.getLogger("flwr")


def upload(model: nn.Module, *, atoms: bool = False) -> ArrayRecord:
    """What a client sends: the coefficients of every layer of atoms; with `atoms`, these as well.

    The server starts from one without atoms. Its configuration says "report-atoms" where it wants them.
    """
    parts = (COEFFICIENTS, ATOMS) if atoms else (COEFFICIENTS,)
    return _record({name: tensor for part in parts for name, tensor in _parts(model, part).items()})


def receive(model: nn.Module, arrays: ArrayRecord) -> nn.Module:
    """Give a model the coefficients that the server sent; atoms, biases, heads and buffers stay as they are."""
    _load(_parts(model, COEFFICIENTS), arrays, "the server's coefficients")
    return model


def keep(model: nn.Module, context: Context) -> None:
    """Put all but the coefficients into the client's context, where Flower has them until the next round."""
    context.state[PERSONAL] = _record(_personal(model))


def recall(model: nn.Module, context: Context) -> bool:
    """Load what `keep` put into the client's context; False where there is nothing yet: the client's first round."""
    if PERSONAL not in context.state:
        return False
    _load(_personal(model), context.state[PERSONAL], "the client's own parts")
    return True


@dataclass(frozen=True, eq=False)
class Round:
    """Who took part in a round of training, who did not and why, and the atoms that were sent."""

    examples: dict[int, float]  # of each client that counted, by its node
    dropped: dict[int, str]
    atoms: AtomTable | None  # one row per client that counted, in the order of `examples`; named by its node

    def clusters(self, count: int) -> dict[int, int]:
        """Which of `count` clusters each client is in, by the cosine of the atoms."""
        if self.atoms is None:
            raise ValueError("no atoms were sent in this round: AtomStrategy(report_atoms=True) asks for them")
        from ...linalg import cluster

        return dict(zip(self.examples, cluster(self.atoms.cosines(), count).tolist(), strict=True))


class AtomStrategy(FedAvg):
    """FedAvg of the coefficients, by the number of examples; takes the arguments of `FedAvg`.

    `rounds` says for every round who counted and who was dropped: clients that fail, or send names, shapes or numbers
    that are not as they should be, or learnt from no example. Where nobody counts, the coefficients of the round before
    stay. `report_atoms` asks for the clients' atoms too; they are never averaged, `rounds[n].atoms` compares them.
    """

    def __init__(self, *args: Any, report_atoms: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.report_atoms = report_atoms
        self.rounds: dict[int, Round] = {}
        self._sent: ArrayRecord | None = None
        self._asked: list[int] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the coefficients to clients drawn at random, and say whether atoms are wanted."""
        other = [name for name in arrays if name.rpartition(".")[2] != COEFFICIENTS]
        if other or not arrays:
            found = f"has {', '.join(other[:3])}" if other else "is empty"
            raise ValueError(f"the server has coefficients alone, initial_arrays {found}: give it upload(model)")
        config[REPORT] = self.report_atoms
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._sent, self._asked = arrays, [message.metadata.dst_node_id for message in messages]
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The mean of the coefficients of all clients that sent what they should, and of their metrics."""
        if self._sent is None:
            raise ValueError("nothing was sent yet: configure_train comes before aggregate_train")
        before = {name: array.numpy() for name, array in self._sent.items()}
        taken, dropped = self._take(replies, before)
        dropped |= {node: "did not answer" for node in self._asked if node not in taken and node not in dropped}
        atoms = {str(node): reply.atoms for node, reply in taken.items()}
        self.rounds[server_round] = Round(
            {node: reply.examples for node, reply in taken.items()},
            dropped,
            AtomTable.of(atoms, torch.float64) if atoms and self.report_atoms else None,
        )
        _warn(server_round, "training", dropped)
        if not taken:
            log.warning("round %d: no client counted, the coefficients stay those of the round before", server_round)
            return self._sent, None
        metrics = self.train_metrics_aggr_fn([reply.content for reply in taken.values()], self.weighted_by_key)
        return _mean(list(taken.values()), before), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean of the metrics, by the number of examples, of clients that sent the same."""
        taken, dropped = self._take(replies)
        _warn(server_round, "evaluation", dropped)
        if not taken:
            return None
        return self.evaluate_metrics_aggr_fn([reply.content for reply in taken.values()], self.weighted_by_key)

    def _take(
        self, replies: Iterable[Message], before: Mapping[str, np.ndarray] | None = None
    ) -> tuple[dict[int, _Reply], Why]:
        """Replies that can be used, in the order of their nodes (not of arrival), and why others cannot.

        `before`: the coefficients that were sent, where the reply must have some too.
        """
        taken: dict[int, _Reply] = {}
        dropped: Why = {}
        for message in sorted(replies, key=lambda message: message.metadata.src_node_id):
            node = message.metadata.src_node_id
            try:
                content, examples = _read_examples(message, self.weighted_by_key)
                arrays = ({}, {}) if before is None else _read_arrays(content, before, self.report_atoms)
                taken[node] = _Reply(content, examples, *arrays)
            except Exception as error:  # a client may send anything: whatever is wrong with it, the round goes on
                dropped[node] = str(error) or type(error).__name__
        for what, layout in (("metrics", _metric_layout), ("atoms", _atom_layout)):
            dropped |= _drop_unusual(taken, layout, what)
        return taken, dropped


@dataclass(frozen=True, eq=False)
class _Reply:
    content: RecordDict
    examples: float
    coefficients: dict[str, np.ndarray]
    atoms: dict[str, Tensor]  # by layer


Why = dict[int, str]  # node: the reason


def _read_examples(message: Message, key: str) -> tuple[RecordDict, float]:
    """The content of a reply, and the number of examples it rests on."""
    if message.has_error():
        raise ValueError(f"failed: {message.error.reason}")
    content = message.content
    if len(content.metric_records) != 1:
        raise ValueError(f"sent {len(content.metric_records)} sets of metrics, one with {key!r} is needed")
    examples = next(iter(content.metric_records.values())).get(key)
    if not isinstance(examples, int | float) or not 0 <= examples <= MOST_EXAMPLES:
        raise ValueError(f"{key!r} is {examples}, not a number of examples")
    if examples == 0:
        raise ValueError(f"{key!r} is 0: it had no data")
    return content, float(examples)


def _read_arrays(
    content: RecordDict, before: Mapping[str, np.ndarray], with_atoms: bool
) -> tuple[dict[str, np.ndarray], dict[str, Tensor]]:
    """Coefficients and atoms of a reply, as finite numbers of the right names and shapes."""
    if len(content.array_records) != 1:
        raise ValueError(f"sent {len(content.array_records)} sets of arrays, one is needed")
    arrays = next(iter(content.array_records.values()))
    layers = [name.rpartition(".")[0] for name in before]
    wanted = {*before, *(parameter_name(layer, ATOMS) for layer in layers if with_atoms)}
    _check_names(wanted, set(arrays), "it sent")
    coefficients = {name: _numbers(name, arrays[name], array.dtype) for name, array in before.items()}
    for name, array in before.items():
        if coefficients[name].shape != array.shape:
            raise ValueError(f"{name} has shape {coefficients[name].shape}, not {array.shape}")
    atoms = {}
    for layer in layers if with_atoms else ():
        name, count = parameter_name(layer, ATOMS), before[parameter_name(layer, COEFFICIENTS)].shape[-1]
        found = _numbers(name, arrays[name], np.dtype(np.float64))  # early on, clients differ in few digits
        if found.ndim != 3 or len(found) != count:
            raise ValueError(f"{name} has shape {found.shape}, not ({count}, height, width)")
        if not found.any():
            raise ValueError(f"{name} are all 0: they have no direction")
        atoms[layer] = torch.from_numpy(found)
    return coefficients, atoms


def _numbers(name: str, array: Array, dtype: np.dtype[Any]) -> np.ndarray:
    found = array.numpy()
    if found.dtype.kind != "f":
        raise ValueError(f"{name} has numbers of type {found.dtype}, not floating point")
    with np.errstate(over="ignore"):  # what does not fit becomes infinite and is counted below
        numbers = found.astype(dtype)
    bad = int((~np.isfinite(numbers)).sum())
    if bad:
        raise ValueError(f"{name} has {bad} of {numbers.size} values that are NaN or infinite")
    return numbers


def _mean(replies: list[_Reply], before: Mapping[str, np.ndarray]) -> ArrayRecord:
    """The weighted mean in float64, then in the server's type: rounding does not add up over clients."""
    total = sum(reply.examples for reply in replies)
    means = {}
    for name, array in before.items():
        mean = np.zeros(array.shape)
        for reply in replies:
            mean += reply.examples * reply.coefficients[name].astype(np.float64)
        means[name] = Array((mean / total).astype(array.dtype))
    return ArrayRecord(means)


def _drop_unusual(taken: dict[int, _Reply], layout: Callable[[_Reply], Hashable], what: str) -> Why:
    """Remove replies whose layout differs from that of most, where only clients know the right one."""
    if not taken:
        return {}
    layouts = {node: layout(reply) for node, reply in taken.items()}
    usual = Counter(layouts.values()).most_common(1)[0][0]
    unusual = {node: found for node, found in layouts.items() if found != usual}
    for node in unusual:
        del taken[node]
    return {node: f"sent {what} {found}, most sent {usual}" for node, found in unusual.items()}


def _metric_layout(reply: _Reply) -> Hashable:
    metrics = next(iter(reply.content.metric_records.values()))
    return tuple(sorted((name, len(value) if isinstance(value, list) else 1) for name, value in metrics.items()))


def _atom_layout(reply: _Reply) -> Hashable:
    return tuple((layer, tuple(atoms.shape)) for layer, atoms in reply.atoms.items())


def _warn(server_round: int, what: str, dropped: Why) -> None:
    for node, why in dropped.items():
        log.warning("round %d: %s goes on without client %d: %s", server_round, what, node, why)


def _parts(model: nn.Module, part: str) -> dict[str, Tensor]:
    return {
        parameter_name(name, part): getattr(layer, part).detach() for name, layer in some_atom_layers(model).items()
    }


def _personal(model: nn.Module) -> dict[str, Tensor]:
    shared = {id(layer.coefficients) for layer in atom_layers(model).values()}
    every = model.state_dict(keep_vars=True)  # the parameters themselves, to compare their ids
    return {name: tensor.detach() for name, tensor in every.items() if id(tensor) not in shared}


def _record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    # NumPy has no bfloat16; float32 has all its numbers.
    return ArrayRecord({k: t.float() if t.dtype is torch.bfloat16 else t for k, t in tensors.items()})


def _load(tensors: Mapping[str, Tensor], arrays: ArrayRecord, what: str) -> None:
    """Copy arrays into tensors of the same names and shapes; none is touched where one does not fit."""
    _check_names(set(tensors), set(arrays), f"{what} have")
    found = {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}
    for name, tensor in tensors.items():
        if tensor.shape != found[name].shape:
            raise ValueError(f"{what}: {name} is {tuple(found[name].shape)}, the model has {tuple(tensor.shape)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(found[name])


def _check_names(wanted: set[str], found: set[str], who: str) -> None:
    if missing := sorted(wanted - found):
        raise ValueError(f"{who} no {missing[0]}" + (f" ({len(missing)} names are missing)" if missing[1:] else ""))
    if extra := sorted(found - wanted):
        raise ValueError(f"{who} {extra[0]}, which is not wanted")
