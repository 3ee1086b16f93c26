"""What arrives at the server broken is dropped and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_clients import RECIPE, WAY, apart, make, some_clients, started

from sosie.train.federated import simulate
from sosie.train.federated.simulation import receive_uploads
from sosie.train.many_networks import State, state_of


def test_bad_uploads_are_dropped_and_named_and_the_round_goes_on() -> None:
    clients = some_clients()

    def receive(turn: int, client: int, upload: State) -> State:
        if (turn, client) == (0, 1):
            upload["0.bias"][2] = torch.nan
        if (turn, client) == (0, 2):
            upload["3.weight"] = upload["3.weight"][:2]
        if (turn, client) == (1, 0):
            del upload["5.bias"]
        if (turn, client) == (1, 3):
            upload["more"] = torch.zeros(1)
        return upload

    found = simulate(make, clients, "fedavg", **WAY, receive=receive)
    assert found.history[0]["dropped"] == {
        1: "0.bias has values that are NaN or infinite",
        2: "3.weight is (2, 48), the server has (6, 48)",
    }
    assert found.history[1]["dropped"] == {0: "5.bias is missing", 3: "the server does not share more"}
    assert all(torch.isfinite(stacked).all() for stacked in found.state.values())
    one = simulate(make, clients, "fedavg(last_epochs=0)", **{**WAY, "rounds": 1})
    assert one.history[0]["dropped"] == {}
    untouched = simulate(make, clients, "fedavg", **WAY, receive=lambda turn, client, upload: upload)
    assert apart(untouched.shared, simulate(make, clients, "fedavg", **WAY).shared) == 0


def test_the_mean_is_of_those_that_are_left() -> None:
    clients = some_clients()
    way = {**WAY, "rounds": 1}
    alone = simulate(make, clients, "local(last_epochs=0)", **way)

    def receive(turn: int, client: int, upload: State) -> State:
        return {name: t * (torch.inf if client == 2 else 1) for name, t in upload.items()}

    found = simulate(make, clients, "fedper(last_epochs=0)", **way, receive=receive)
    left = [0, 1, 3]
    assert torch.allclose(found.shared["3.weight"], alone.state["3.weight"][left].mean(0), atol=1e-15)
    assert torch.equal(found.state["5.weight"][left], alone.state["5.weight"][left])
    assert torch.equal(found.state["5.weight"][2], state_of(started())["5.weight"])  # as if it had not taken part


def test_a_round_in_which_all_are_dropped_keeps_what_was() -> None:
    def receive(turn: int, client: int, upload: State) -> State:
        return {name: t * torch.nan for name, t in upload.items()}

    found = simulate(make, some_clients(), "fedavg(last_epochs=0)", **WAY, receive=receive)
    assert apart(found.shared, state_of(started())) == 0
    assert len(found.history[0]["dropped"]) == 4
    assert "every client was dropped" in found.history[0]["note"]


def test_clients_that_diverge_are_dropped() -> None:
    found = simulate(make, some_clients(), "local", **{**WAY, "recipe": replace(RECIPE, rate=1e200)})
    assert apart(state_of(found.model(0)), state_of(started())) == 0
    assert len(found.history[-1]["dropped"]) == 4
    assert found.history[-1]["last"]
    together = simulate(make, some_clients(), "fedavg", **{**WAY, "recipe": replace(RECIPE, rate=1e200)})
    assert apart(together.shared, state_of(started())) == 0
    assert "every client was dropped" in together.history[1]["note"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda upload: None, "the upload is a NoneType, not tensors by name"),
        # Finite in double precision, infinite as the server has it: it would end the learning of all.
        (lambda upload: {name: t.double() + 1e300 for name, t in upload.items()}, "NaN or infinite"),
        (lambda upload: {name: t + 1j for name, t in upload.items()}, "cannot be averaged"),
        (lambda upload: {name: t.to("meta") for name, t in upload.items()}, "cannot be averaged"),
        (lambda upload: {name: t.to_sparse() for name, t in upload.items()}, "cannot be averaged"),
        (lambda upload: {name: t.numpy() for name, t in upload.items()}, "is a ndarray, not a tensor"),
    ],
)
def test_uploads_of_no_use_are_dropped_before_they_reach_the_mean(change: Callable[[State], Any], reason: str) -> None:
    clients = some_clients()
    clients = replace(clients, images=clients.images.float())
    found = simulate(
        lambda: make().float(), clients, "fedavg", **{**WAY, "rounds": 1},
        receive=lambda turn, client, upload: change(upload) if client == 1 else upload,
    )  # fmt: skip
    assert list(found.history[0]["dropped"]) == [1]
    assert reason in found.history[0]["dropped"][1]
    assert all(torch.isfinite(t).all() for t in found.shared.values())


def test_a_batch_norm_counts_its_batches_in_one_number_a_client() -> None:
    kept = {"bn.running_var": torch.ones(3, 2), "bn.num_batches_tracked": torch.tensor([4, 4, 4])}
    kept["bn.running_var"][1, 0] = torch.nan
    uploads, good, dropped = receive_uploads(0, [5, 6, 7], {"w": torch.ones(3, 2)}, kept, None)
    assert good == [0, 2]
    assert uploads["w"].shape == (2, 2)
    assert dropped == {6: "bn.running_var has values that are NaN or infinite"}
