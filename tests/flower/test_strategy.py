"""The server averages coefficients only, exactly; whoever sends something wrong is dropped by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr has an environment of its own: make test-flower")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.clientapp import ClientApp
from in_process import InProcess, arrays_of, metrics_of
from torch import nn

from sosie.models import atom_layers, small_cnn, with_atoms
from sosie.stats import AtomTable
from sosie.train.federated.flower import AtomStrategy, keep, recall, receive, upload

EXAMPLES = (10, 20, 30, 5)


def made(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return small_cnn(width=4, atoms=3)


def moving_clients() -> ClientApp:
    """Clients that move all their parameters by a random step of their own instead of training."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: object) -> Message:
        config, client = message.content["config"], context.node_config["partition-id"]
        model = made()
        recall(model, context)
        receive(model, message.content["arrays"])
        generator = torch.Generator().manual_seed(100 * config["server-round"] + client)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=generator) / 3
        keep(model, context)
        metrics = MetricRecord({"num-examples": EXAMPLES[client], "loss": float(client)})
        content = type(message.content)({"arrays": upload(model, atoms=config["report-atoms"]), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: object) -> Message:
        client = context.node_config["partition-id"]
        metrics = MetricRecord({"num-examples": EXAMPLES[client], "accuracy": client / 10})
        return Message(type(message.content)({"metrics": metrics}), reply_to=message)

    return app


def run(grid: InProcess, rounds: int = 1, **options: object) -> tuple[AtomStrategy, object]:
    options = {"min_train_nodes": 4, "fraction_evaluate": 0.0} | options
    strategy = AtomStrategy(**options)
    return strategy, strategy.start(grid, upload(made()), num_rounds=rounds)


def mean(replies: list[Message]) -> dict[str, np.ndarray]:
    """A plain weighted mean, in float64, in the order of the nodes."""
    replies = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
    weights = [metrics_of(reply)["num-examples"] for reply in replies]
    names = [name for name in arrays_of(replies[0]) if name.endswith(".coefficients")]
    return {
        name: np.average([arrays_of(r)[name].numpy().astype(float) for r in replies], axis=0, weights=weights).astype(
            np.float32
        )
        for name in names
    }


def assert_exactly(arrays: ArrayRecord, wanted: dict[str, np.ndarray]) -> None:
    assert list(arrays) == list(wanted)
    for name, array in wanted.items():
        assert arrays[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(arrays[name].numpy(), array)


def test_coefficients_are_the_weighted_mean_and_nothing_else_travels() -> None:
    grid = InProcess(moving_clients(), 4)
    strategy, result = run(grid, rounds=2)
    assert_exactly(result.arrays, mean(grid.replies[4:]))
    assert set(result.arrays) == {f"{name}.coefficients" for name in atom_layers(made())}
    assert all(set(arrays_of(reply)) == set(result.arrays) for reply in grid.replies)
    assert strategy.rounds[2].examples == {grid.node(i): EXAMPLES[i] for i in (3, 2, 1, 0)}
    assert not strategy.rounds[2].dropped
    assert strategy.rounds[2].atoms is None
    assert result.train_metrics_clientapp[2]["loss"] == pytest.approx((20 + 60 + 15) / 65)


def test_a_clients_own_parts_last_and_differ_from_those_of_others() -> None:
    grid = InProcess(moving_clients(), 4)
    run(grid, rounds=2)
    for client, context in enumerate(grid.contexts.values()):
        model = made()
        assert recall(model, context)
        expected = made().state_dict()
        for number in (1, 2):
            generator = torch.Generator().manual_seed(100 * number + client)
            for name, parameter in made().named_parameters():
                expected[name] = expected[name] + torch.randn(parameter.shape, generator=generator) / 3
        for name, tensor in model.state_dict().items():
            if not name.endswith(".coefficients"):
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_evaluation_is_averaged_by_examples() -> None:
    _, result = run(InProcess(moving_clients(), 4), fraction_evaluate=1.0)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx((2 + 6 + 1.5) / 65)


def test_atoms_make_a_table_each_round() -> None:
    grid = InProcess(moving_clients(), 4)
    strategy, result = run(grid, rounds=2, report_atoms=True)
    for number in (1, 2):
        replies = sorted(grid.replies[4 * number - 4 : 4 * number], key=lambda reply: reply.metadata.src_node_id)
        names = [str(reply.metadata.src_node_id) for reply in replies]
        atoms = [
            {layer: torch.from_numpy(arrays_of(r)[f"{layer}.atoms"].numpy()) for layer in atom_layers(made())}
            for r in replies
        ]
        found = strategy.rounds[number].atoms
        assert list(found.names) == names == [str(node) for node in strategy.rounds[number].examples]
        torch.testing.assert_close(found.cosines(), AtomTable.of(atoms, torch.float64).cosines(), rtol=0, atol=0)
    assert all(name.endswith(".coefficients") for name in result.arrays)
    assert_exactly(result.arrays, mean(grid.replies[4:]))


def test_clusters_of_clients() -> None:
    strategy, _ = run(InProcess(moving_clients(), 4), report_atoms=True)
    found = strategy.rounds[1].clusters(2)
    assert list(found) == list(strategy.rounds[1].examples)
    assert len(set(found.values())) == 2


def test_clusters_without_atoms_are_refused() -> None:
    strategy, _ = run(InProcess(moving_clients(), 4))
    with pytest.raises(ValueError, match="report_atoms=True"):
        strategy.rounds[1].clusters(2)


def replaced(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], Message | None]:
    def change_array(reply: Message) -> Message:
        arrays_of(reply)[name] = Array(change(arrays_of(reply)[name].numpy().copy()))
        return reply

    return change_array


def renamed(reply: Message) -> Message:
    arrays_of(reply)["conv9.coefficients"] = arrays_of(reply).pop("conv2.coefficients")
    return reply


def added(reply: Message) -> Message:
    arrays_of(reply)["fc.bias"] = Array(np.zeros(3, np.float32))
    return reply


def no_arrays(reply: Message) -> Message:
    reply.content.pop("arrays")
    return reply


def garbled(reply: Message) -> Message:
    arrays_of(reply)["conv2.coefficients"] = Array("float32", (8, 4, 3), "numpy.ndarray", b"not numbers")
    return reply


def examples(value: float) -> Callable[[Message], Message | None]:
    def change(reply: Message) -> Message:
        metrics_of(reply)["num-examples"] = value
        return reply

    return change


def other_metrics(reply: Message) -> Message:
    metrics_of(reply)["speed"] = 1.0
    return reply


def with_nan(array: np.ndarray) -> np.ndarray:
    array.flat[3] = np.nan
    return array


WRONG = {
    "nan": (replaced("conv2.coefficients", with_nan), r"conv2\.coefficients has 1 of 96 values that are NaN"),
    "too large": (
        replaced("conv2.coefficients", lambda a: a.astype(float) + 1e300),
        "96 of 96 values that are NaN or infinite",
    ),
    "shape": (replaced("conv3.coefficients", lambda a: a[:-1]), r"conv3.* \(7, 8, 3\), not \(8, 8, 3\)"),
    "whole numbers": (replaced("conv2.coefficients", lambda a: a.astype(int)), "type int64, not floating point"),
    "complex numbers": (replaced("conv2.coefficients", lambda a: a + 1j), "type complex64, not floating point"),
    "name": (renamed, r"no conv2\.coefficients"),
    "more": (added, r"fc\.bias, which is not wanted"),
    "no arrays": (no_arrays, "0 sets of arrays"),
    "garbled": (garbled, "."),
    "no examples": (examples(0), "'num-examples' is 0: it had no data"),
    "nan examples": (examples(float("nan")), "is nan, not a number of examples"),
    "negative examples": (examples(-3), "is -3, not a number of examples"),
    "absurd examples": (examples(1e300), "not a number of examples"),
    "other metrics": (other_metrics, "speed"),
    "atoms nan": (replaced("conv1.atoms", with_nan), r"conv1\.atoms has 1 of 27"),
    "atoms number": (replaced("conv1.atoms", lambda a: a[:2]), r"\(2, 3, 3\), not \(3, height, width\)"),
    "atoms size": (replaced("conv1.atoms", lambda a: a[:, :2]), r"\(3, 2, 3\).*most sent"),
    "atoms zero": (replaced("conv1.atoms", np.zeros_like), "no direction"),
    "silence": (lambda reply: None, "did not answer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_who_sends_something_wrong_is_dropped_and_the_round_goes_on(case: str) -> None:
    spoil, said = WRONG[case]
    grid = InProcess(moving_clients(), 4, lambda _, client, reply: spoil(reply) if client == 2 else reply)
    strategy, result = run(grid, report_atoms=True)
    done = strategy.rounds[1]
    assert list(done.dropped) == [grid.node(2)]
    assert re.search(said, done.dropped[grid.node(2)]), done.dropped
    good = [reply for reply in grid.replies if reply.metadata.src_node_id != grid.node(2)]
    assert_exactly(result.arrays, mean(good))
    assert list(done.atoms.names) == [str(grid.node(i)) for i in (3, 1, 0)]
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx((20 + 15) / 35)


def test_a_client_that_fails_is_dropped() -> None:
    app = moving_clients()
    working = app._registered_funcs["train.default"]

    def failing(message: Message, context: object) -> Message:
        if context.node_config["partition-id"] == 1:
            raise RuntimeError("out of memory")
        return working(message, context)

    app._registered_funcs["train.default"] = failing
    grid = InProcess(app, 4)
    strategy, _ = run(grid)
    assert strategy.rounds[1].dropped == {grid.node(1): "failed: out of memory"}


def test_where_all_are_dropped_the_coefficients_stay(caplog: pytest.LogCaptureFixture) -> None:
    grid = InProcess(moving_clients(), 4, lambda number, _, reply: renamed(reply) if number == 2 else reply)
    strategy, result = run(grid, rounds=2)
    assert len(strategy.rounds[2].dropped) == 4
    assert_exactly(result.arrays, mean(grid.replies[:4]))
    said = caplog.text
    assert "round 2: no client counted, the coefficients stay those of the round before" in said
    assert f"round 2: training continues without client {grid.node(2)}: it sent no conv2.coefficients" in said

    _, result = run(InProcess(moving_clients(), 4, lambda *_: None))
    start = {name: array.numpy() for name, array in upload(made()).items()}
    assert_exactly(result.arrays, start)


def test_the_order_of_arrival_does_not_matter() -> None:
    strategy, result = run(grid := InProcess(moving_clients(), 4))
    again, _ = strategy.aggregate_train(1, reversed(grid.replies))
    assert_exactly(again, {name: array.numpy() for name, array in result.arrays.items()})


def test_the_server_starts_from_coefficients_alone() -> None:
    everything = ArrayRecord(made().state_dict())
    with pytest.raises(ValueError, match=r"has conv1\.atoms, .*give it upload\(model\)"):
        AtomStrategy().configure_train(1, everything, ConfigRecord(), InProcess(moving_clients(), 4))
    with pytest.raises(ValueError, match="is empty"):
        AtomStrategy().configure_train(1, ArrayRecord(), ConfigRecord(), InProcess(moving_clients(), 4))
    with pytest.raises(ValueError, match="configure_train comes before"):
        AtomStrategy().aggregate_train(1, [])


def test_receive_keeps_personal_parts_and_refuses_what_does_not_fit() -> None:
    model, other = made(1), made(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    receive(model, upload(other))
    for name, tensor in model.state_dict().items():
        wanted = other.state_dict()[name] if name.endswith(".coefficients") else before[name]
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
    wider = small_cnn(width=4, atoms=4)
    with pytest.raises(ValueError, match=r"conv1\.coefficients is \(4, 1, 4\), the model has \(4, 1, 3\)"):
        receive(model, upload(wider))
    with pytest.raises(ValueError, match=r"conv1\.atoms, which is not wanted"):
        receive(model, upload(other, atoms=True))
    with pytest.raises(ValueError, match="no layer of atoms"):
        upload(nn.Linear(2, 2))


def test_own_parts_come_back_with_buffers_in_any_precision() -> None:
    def normed(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = with_atoms(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), 3)
        model(torch.randn(5, 1, 8, 8))
        return model.to(torch.bfloat16)

    context = InProcess(moving_clients(), 1).contexts.popitem()[1]
    first, second = normed(0), normed(1)
    assert not recall(first, context)
    keep(first, context)
    assert recall(second, context)
    receive(second, upload(first))
    assert {"1.running_mean", "1.num_batches_tracked", "0.atoms"} <= set(context.state["sosie-personal"])
    assert "0.coefficients" not in context.state["sosie-personal"]
    for name, tensor in second.state_dict().items():
        torch.testing.assert_close(tensor, first.state_dict()[name], rtol=0, atol=0)


@pytest.mark.parametrize(("given", "seen"), [(None, "0"), ("1", "1")])
def test_nothing_is_reported_unless_asked_for(given: str | None, seen: str) -> None:
    code = "import sosie.train.federated.flower, os; print(os.environ['FLWR_TELEMETRY_ENABLED'])"
    environment = {k: v for k, v in os.environ.items() if k != "FLWR_TELEMETRY_ENABLED"}
    environment |= {"FLWR_TELEMETRY_ENABLED": given} if given else {}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == seen
