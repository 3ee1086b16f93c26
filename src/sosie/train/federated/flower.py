"""Flower (flwr) with filter atoms: the server averages coefficients, everything else stays with the client.

The server runs `AtomStrategy` instead of `FedAvg`. A client makes its model, restores its own parts with `recall`,
loads the coefficients with `receive`, trains, stores its own parts with `keep` and replies with `upload`.
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

# flwr sends usage data to its makers unless this is 0 when it is imported; a value that is set already is kept.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
except ImportError as error:
    raise ImportError("sosie.train.federated.flower needs flwr: pip install 'sosie[flower]'") from error

COEFFICIENTS, ATOMS = "coefficients", "atoms"
PERSONAL = "sosie-personal"  # the record of a client's own parts in its context
REPORT = "report-atoms"  # in the configuration sent with the coefficients: whether to send the atoms too
MOST_EXAMPLES = 2**53  # floats beyond this cannot count
Reply = tuple[RecordDict, float, dict[str, np.ndarray]]  # content, number of examples, arrays by name
Reasons = dict[int, str]  # by node
log = logging.getLogger("flwr")


def upload(model: nn.Module, *, atoms: bool = False) -> ArrayRecord:
    """The coefficients of every layer of atoms, which a client sends; with `atoms`, also the atoms.

    The server starts from an upload without atoms. It asks for them by "report-atoms" in its configuration.
    """
    parts = (COEFFICIENTS, ATOMS) if atoms else (COEFFICIENTS,)
    return _record({name: tensor for part in parts for name, tensor in _parts(model, part).items()})


def receive(model: nn.Module, arrays: ArrayRecord) -> nn.Module:
    """Load the coefficients that the server sent; atoms, biases, heads and buffers stay as they are."""
    _load(_parts(model, COEFFICIENTS), arrays, "the server's coefficients")
    return model


def keep(model: nn.Module, context: Context) -> None:
    """Store all but the coefficients in the client's context, which Flower keeps until the next round."""
    context.state[PERSONAL] = _record(_personal(model))


def recall(model: nn.Module, context: Context) -> bool:
    """Load what `keep` stored in the client's context; returns False in the client's first round, when it is empty."""
    if PERSONAL not in context.state:
        return False
    _load(_personal(model), context.state[PERSONAL], "the client's own parts")
    return True


@dataclass(frozen=True, eq=False)
class Round:
    """The clients that took part in a round of training, those that did not and why, and the atoms that were sent."""

    examples: dict[int, float]  # of each client that counted, by its node
    dropped: dict[int, str]
    atoms: AtomTable | None  # one row per client that counted, in the order of `examples`, named by its node

    def clusters(self, count: int) -> dict[int, int]:
        """The number of the cluster of each client, of `count` clusters by the cosine of the atoms."""
        if self.atoms is None:
            raise ValueError("no atoms were sent in this round: AtomStrategy(report_atoms=True) asks for them")
        from ...linalg import cluster

        return dict(zip(self.examples, cluster(self.atoms.cosines(), count).tolist(), strict=True))


class AtomStrategy(FedAvg):
    """FedAvg of the coefficients, by the number of examples; takes the arguments of `FedAvg`.

    `rounds` has for every round the clients that counted and those that were dropped: clients that fail, that send
    wrong names, shapes or numbers, or that had no examples. If none counts, the coefficients of the round before stay.
    `report_atoms` asks for the clients' atoms too; they are never averaged, but `rounds[n].atoms` compares them.
    """

    def __init__(self, *args: Any, report_atoms: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.report_atoms = report_atoms
        self.rounds: dict[int, Round] = {}
        self._sent: ArrayRecord | None = None
        self._nodes: list[int] = []  # of the clients that train in this round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the coefficients to random clients, and whether atoms are wanted."""
        other = [name for name in arrays if name.rpartition(".")[2] != COEFFICIENTS]
        if other or not arrays:
            content = f"has {', '.join(other[:3])}" if other else "is empty"
            raise ValueError(f"the server takes only coefficients, initial_arrays {content}: give it upload(model)")
        config[REPORT] = self.report_atoms
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._sent, self._nodes = arrays, [message.metadata.dst_node_id for message in messages]
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The mean of the coefficients of all clients with a valid reply, and of their metrics."""
        if self._sent is None:
            raise ValueError("nothing was sent yet: configure_train comes before aggregate_train")
        before = {name: array.numpy() for name, array in self._sent.items()}
        taken, dropped = self._take(replies, before)
        dropped |= {node: "did not answer" for node in self._nodes if node not in taken and node not in dropped}
        examples = {node: count for node, (_, count, _) in taken.items()}
        atoms = {str(node): _atoms(reply) for node, reply in taken.items()}
        table = AtomTable.of(atoms, torch.float64) if atoms and self.report_atoms else None
        self.rounds[server_round] = Round(examples, dropped, table)
        _warn(server_round, "training", dropped)
        if not taken:
            log.warning("round %d: no client counted, the coefficients stay those of the round before", server_round)
            return self._sent, None
        metrics = self.train_metrics_aggr_fn([content for content, _, _ in taken.values()], self.weighted_by_key)
        return _mean(list(taken.values()), before), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean of the metrics, by the number of examples, of clients that sent the same metrics."""
        taken, dropped = self._take(replies)
        _warn(server_round, "evaluation", dropped)
        if not taken:
            return None
        return self.evaluate_metrics_aggr_fn([content for content, _, _ in taken.values()], self.weighted_by_key)

    def _take(
        self, replies: Iterable[Message], before: Mapping[str, np.ndarray] | None = None
    ) -> tuple[dict[int, Reply], Reasons]:
        """The valid replies, in the order of their nodes (not of arrival), and the reasons why others are not.

        `before`: the coefficients that were sent; a valid reply then has coefficients too.
        """
        taken: dict[int, Reply] = {}
        dropped: Reasons = {}
        for message in sorted(replies, key=lambda message: message.metadata.src_node_id):
            node = message.metadata.src_node_id
            try:
                content, examples = _read_examples(message, self.weighted_by_key)
                taken[node] = content, examples, _read_arrays(content, before, self.report_atoms) if before else {}
            except Exception as error:  # a client may send anything: whatever is wrong with it, the round continues
                dropped[node] = str(error) or type(error).__name__
        for what, layout in (("metrics", _metric_layout), ("atoms", _atom_layout)):
            dropped |= _drop_unusual(taken, layout, what)
        return taken, dropped


def _atoms(reply: Reply) -> dict[str, Tensor]:
    """The atoms of a reply, by layer."""
    names = [name.rpartition(".") for name in reply[2]]
    return {layer: torch.from_numpy(reply[2][layer + dot + last]) for layer, dot, last in names if last == ATOMS}


def _read_examples(message: Message, key: str) -> tuple[RecordDict, float]:
    """The content of a reply, and its number of examples."""
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


def _read_arrays(content: RecordDict, before: Mapping[str, np.ndarray], with_atoms: bool) -> dict[str, np.ndarray]:
    """The coefficients and atoms of a reply, checked to be finite numbers with the right names and shapes."""
    if len(content.array_records) != 1:
        raise ValueError(f"sent {len(content.array_records)} sets of arrays, one is needed")
    arrays = next(iter(content.array_records.values()))
    layers = [name.rpartition(".")[0] for name in before]
    wanted = {*before, *(parameter_name(layer, ATOMS) for layer in layers if with_atoms)}
    _check_names(wanted, set(arrays), "it sent")
    result = {name: _numbers(name, arrays[name], array.dtype) for name, array in before.items()}
    for name, array in before.items():
        if result[name].shape != array.shape:
            raise ValueError(f"{name} has shape {result[name].shape}, not {array.shape}")
    for layer in layers if with_atoms else ():
        name, count = parameter_name(layer, ATOMS), before[parameter_name(layer, COEFFICIENTS)].shape[-1]
        atoms = _numbers(name, arrays[name], np.dtype(np.float64))  # early on, clients differ in few digits
        if atoms.ndim != 3 or len(atoms) != count:
            raise ValueError(f"{name} has shape {atoms.shape}, not ({count}, height, width)")
        if not atoms.any():
            raise ValueError(f"{name} are all 0: they have no direction")
        result[name] = atoms
    return result


def _numbers(name: str, array: Array, dtype: np.dtype[Any]) -> np.ndarray:
    values = array.numpy()
    if values.dtype.kind != "f":
        raise ValueError(f"{name} has numbers of type {values.dtype}, not floating point")
    with np.errstate(over="ignore"):  # what does not fit becomes infinite and is counted below
        numbers = values.astype(dtype)
    bad = int((~np.isfinite(numbers)).sum())
    if bad:
        raise ValueError(f"{name} has {bad} of {numbers.size} values that are NaN or infinite")
    return numbers


def _mean(replies: list[Reply], before: Mapping[str, np.ndarray]) -> ArrayRecord:
    """The weighted mean in float64, then in the server's type: rounding does not add up over clients."""
    total = sum(examples for _, examples, _ in replies)
    means = {}
    for name, array in before.items():
        mean = np.zeros(array.shape)
        for _, examples, arrays in replies:
            mean += examples * arrays[name].astype(np.float64)
        means[name] = Array((mean / total).astype(array.dtype))
    return ArrayRecord(means)


def _drop_unusual(taken: dict[int, Reply], layout: Callable[[Reply], Hashable], what: str) -> Reasons:
    """Remove replies whose layout differs from that of most, where only clients know the right one."""
    layouts = {node: layout(reply) for node, reply in taken.items()}
    usual = Counter(layouts.values()).most_common(1)
    unusual = {node: layout for node, layout in layouts.items() if layout != usual[0][0]}
    for node in unusual:
        del taken[node]
    return {node: f"sent {what} {layout}, most sent {usual[0][0]}" for node, layout in unusual.items()}


def _metric_layout(reply: Reply) -> Hashable:
    metrics = next(iter(reply[0].metric_records.values()))
    return tuple(sorted((name, len(value) if isinstance(value, list) else 1) for name, value in metrics.items()))


def _atom_layout(reply: Reply) -> Hashable:
    return tuple((layer, tuple(atoms.shape)) for layer, atoms in _atoms(reply).items())


def _warn(server_round: int, what: str, dropped: Reasons) -> None:
    for node, why in dropped.items():
        log.warning("round %d: %s continues without client %d: %s", server_round, what, node, why)


def _parts(model: nn.Module, part: str) -> dict[str, Tensor]:
    return {
        parameter_name(name, part): getattr(layer, part).detach() for name, layer in some_atom_layers(model).items()
    }


def _personal(model: nn.Module) -> dict[str, Tensor]:
    shared = {id(layer.coefficients) for layer in atom_layers(model).values()}
    state = model.state_dict(keep_vars=True)  # the parameters themselves, to compare their ids
    return {name: tensor.detach() for name, tensor in state.items() if id(tensor) not in shared}


def _record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    # NumPy has no bfloat16; float32 represents all its numbers.
    return ArrayRecord({k: t.float() if t.dtype is torch.bfloat16 else t for k, t in tensors.items()})


def _load(tensors: Mapping[str, Tensor], arrays: ArrayRecord, what: str) -> None:
    """Copy arrays into tensors of the same names and shapes; if one does not fit, none is changed."""
    _check_names(set(tensors), set(arrays), f"{what} have")
    values = {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}
    for name, tensor in tensors.items():
        if tensor.shape != values[name].shape:
            raise ValueError(f"{what}: {name} is {tuple(values[name].shape)}, the model has {tuple(tensor.shape)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])


def _check_names(wanted: set[str], names: set[str], who: str) -> None:
    if missing := sorted(wanted - names):
        raise ValueError(f"{who} no {missing[0]}" + (f" ({len(missing)} names are missing)" if missing[1:] else ""))
    if extra := sorted(names - wanted):
        raise ValueError(f"{who} {extra[0]}, which is not wanted")
