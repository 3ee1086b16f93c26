"""Federated learning is what its formulas say: identities with training that has no server."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from forged import save_file
from small_clients import RECIPE, WAY, apart, make, some_clients, started
from torch import nn
from torch.nn import functional

from sosie.files import DamagedFile
from sosie.models import freeze
from sosie.train import fit
from sosie.train.federated import METHODS, Federated, Method, Phase, simulate
from sosie.train.federated.simulation import order_seed
from sosie.train.many_networks import State, state_of


def test_one_full_step_of_fedavg_is_gradient_descent_on_all_images() -> None:
    clients = some_clients()
    way = {**WAY, "rounds": 3, "recipe": replace(RECIPE, epochs=1, batch=12, momentum=0.0)}
    found = simulate(make, clients, "fedavg(last_epochs=0)", **way)
    model, every = started(), clients.train.flatten()
    for _ in range(3):
        gradients = torch.autograd.grad(
            functional.cross_entropy(model(clients.images[every]), clients.labels[every]), list(model.parameters())
        )
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= 0.05 * gradient
    assert apart(found.shared, state_of(model)) < 1e-14
    assert apart(state_of(found.model(2)), state_of(model)) < 1e-14
    assert apart(found.shared, state_of(started())) > 1e-3


@pytest.mark.parametrize("at_once", [None, 3])
def test_local_is_the_ordinary_loop_of_each_client_alone(at_once: int | None) -> None:
    clients = some_clients()
    found = simulate(make, clients, "local", **WAY, at_once=at_once)
    for client in range(len(clients)):
        model, own = started(), clients.train[client]
        for turn in range(3):  # two rounds and the last training
            seed = order_seed(4, turn, 0, client)
            fit(model, clients.images[own], clients.labels[own], recipe=RECIPE, seed=seed)  # fmt: skip
        assert apart(state_of(found.model(client)), state_of(model)) < 1e-12
        answers = model(clients.images[clients.test[client]]).argmax(1)
        assert found.accuracy[client] == (answers == clients.labels[clients.test[client]]).float().mean()


def test_methods_without_their_pull_are_simpler_ones() -> None:
    clients = some_clients()
    average = simulate(make, clients, "fedavg", **WAY)
    for same in ("fedprox(mu=0)", "ditto(lam=0)"):
        assert apart(simulate(make, clients, same, **WAY).shared, average.shared) == 0
    assert apart(simulate(make, clients, "fedprox(mu=1)", **WAY).shared, average.shared) > 1e-3
    # Ditto's own models see the images in the order of their own phase.
    second = Method("second", "none", "all", (Phase("none"), Phase("all")), Phase("all"))
    alone = simulate(make, clients, second, **{**WAY, "share": 0.5})
    ditto = simulate(make, clients, "ditto(lam=0)", **{**WAY, "share": 0.5})
    assert apart(ditto.state, alone.state) < 1e-12
    assert apart(simulate(make, clients, "ditto(lam=1)", **{**WAY, "share": 0.5}).state, alone.state) > 1e-3


def test_a_strong_pull_keeps_ditto_near_the_servers_model() -> None:
    clients = some_clients()
    far, near = (simulate(make, clients, f"ditto(lam={lam})", **{**WAY, "rounds": 6}) for lam in (0.0, 15.0))
    away = [
        sum(float((found.state[n] - found.shared[n]).square().sum()) for n in found.shared) for found in (far, near)
    ]
    assert away[1] < 0.1 * away[0]


def test_the_server_averages_coefficients_and_leaves_atoms_alone() -> None:
    clients = some_clients()
    seen: dict[int, State] = {}
    way = {**WAY, "rounds": 1}
    found = simulate(
        make,
        clients,
        "atoms(last_epochs=0)",
        **way,
        after_round=lambda turn, state: seen.update({turn: copy.deepcopy(state)}),
    )
    alone = simulate(make, clients, "local(last_epochs=0)", **way)
    assert set(found.shared) == {"0.coefficients"}
    assert torch.allclose(found.shared["0.coefficients"], alone.state["0.coefficients"].mean(0), atol=1e-15)
    for name in set(found.state) - {"0.coefficients"}:
        assert torch.equal(found.state[name], alone.state[name])
    assert float((found.state["0.atoms"][0] - found.state["0.atoms"][1]).abs().max()) > 1e-4
    assert torch.equal(seen[-1]["0.atoms"][0], seen[-1]["0.atoms"][3])
    assert torch.equal(seen[0]["0.atoms"], found.state["0.atoms"])
    after = simulate(make, clients, "atoms(last_epochs=2)", **way)
    assert torch.equal(after.shared["0.coefficients"], found.shared["0.coefficients"])
    assert torch.equal(after.state["0.coefficients"][1], found.shared["0.coefficients"])
    cosines = after.atoms().cosines()
    expected = functional.cosine_similarity(after.state["0.atoms"][0].flatten(), after.state["0.atoms"][2].flatten(), 0)
    assert float(cosines[0, 2]) == pytest.approx(float(expected), abs=1e-6)


def test_clients_may_start_from_atoms_of_their_own() -> None:
    clients = some_clients()
    way = {**WAY, "rounds": 0}
    found = simulate(make, clients, "atoms(last_epochs=0, same_atoms=False)", **way)
    first = started()[0].atoms
    assert found.state["0.atoms"].square().mean() == pytest.approx(float(first.detach().square().mean()), rel=0.6)
    assert abs(float(found.atoms().cosines()[0, 1])) < 0.9
    with pytest.raises(ValueError, match=r"0\.atoms is shared by all clients"):
        simulate(make, clients, "fedavg(same_atoms=False)", **way)
    with pytest.raises(ValueError, match="no layer of atoms"):
        simulate(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double(), clients, "local(same_atoms=False)", **way
        )


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_heads_are_the_clients_own(method: str) -> None:
    clients = some_clients()
    way = {**WAY, "rounds": 1, "recipe": replace(RECIPE, epochs=3)}
    found = simulate(make, clients, method, **way)
    assert found.head == ("5",)
    assert set(found.state) - set(found.shared) == {"5.weight", "5.bias"}
    assert torch.equal(found.state["3.weight"][0], found.shared["3.weight"])  # the last training is of the head
    assert not torch.equal(found.state["5.weight"][0], found.state["5.weight"][1])
    wide = simulate(make, clients, method, **way, head=["3", "5"])
    assert set(wide.shared) == {"0.coefficients", "0.atoms", "0.bias"}


def test_fedrep_trains_the_head_then_the_body() -> None:
    clients = some_clients(count=1)
    found = simulate(
        make,
        clients,
        "fedrep(body_epochs=2, last_epochs=0)",
        **{**WAY, "rounds": 1, "recipe": replace(RECIPE, epochs=3)},
    )
    model, own = started(), clients.train[0]
    for phase, (trained, epochs) in enumerate([("5.", 1), ("", 2)]):
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("5.") == bool(trained))
        fit(
            model,
            clients.images[own],
            clients.labels[own],
            recipe=replace(RECIPE, epochs=epochs),
            seed=order_seed(4, 0, phase, 0),
        )
    assert apart(state_of(found.model(0)), state_of(model)) < 1e-12
    with pytest.raises(ValueError, match="fedrep leaves -1 of 2 epochs to train the head"):
        simulate(make, clients, "fedrep(body_epochs=3)", **WAY)


@pytest.mark.parametrize("method", METHODS)
def test_same_seed_same_result_and_methods_see_the_same_clients(method: str) -> None:
    clients = some_clients()
    way = {**WAY, "share": 0.5, "measure_every": 2}
    one, two = (simulate(make, clients, method, **way) for _ in range(2))
    assert apart(one.state, two.state) == 0
    assert apart(one.state, simulate(make, clients, method, **{**way, "seed": 5}).state) > 1e-3
    other = simulate(make, clients, "fedavg", **way)
    assert [entry["clients"] for entry in one.history] == [entry["clients"] for entry in other.history]
    assert [len(entry["clients"]) for entry in one.history] == [2, 2, 4]
    assert "accuracy" not in one.history[0]
    assert one.history[1]["accuracy"] == pytest.approx(float(one.before.mean()))
    assert one.history[-1]["accuracy"] == pytest.approx(float(one.accuracy.mean()))
    assert (one.global_accuracy is not None) == (method in ("fedavg", "fedprox", "ditto"))
    if method in ("fedavg", "fedprox"):
        assert torch.equal(one.global_accuracy, one.before)  # type: ignore[arg-type]


def test_dropout_is_seeded_and_leaves_the_global_seed_alone() -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3)).double()

    state = torch.get_rng_state()
    one, two = (simulate(dropping, some_clients(), "fedavg", **WAY) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert apart(one.state, two.state) == 0


def test_frozen_coefficients_stay_the_same_for_all() -> None:
    found = simulate(lambda: freeze(make(), "coefficients"), some_clients(), "local", **WAY)
    assert torch.equal(found.state["0.coefficients"][3], state_of(started())["0.coefficients"])
    assert found.atoms().cosines().shape == (4, 4)


def test_atoms_on_coefficients_that_differ_are_refused() -> None:
    clients = some_clients()
    found = simulate(make, clients, "fedavg", **WAY)
    with pytest.raises(ValueError, match="coefficients differ"):
        found.atoms()
    assert found.atoms(require_shared=False).rows.shape == (4, 36)
    shared = simulate(make, clients, "fedavg(last='own')", **WAY)
    assert shared.atoms().rows.shape == (4, 36)
    assert torch.equal(shared.state["0.coefficients"][1], shared.shared["0.coefficients"])


def test_save_and_load(tmp_path: Any) -> None:
    def receive(turn: int, client: int, upload: State) -> State:
        return {name: t * torch.nan for name, t in upload.items()} if client == 1 else upload

    found = simulate(make, some_clients(), "atoms", **WAY, receive=receive)
    path = found.save(tmp_path / "found.safetensors")
    again = Federated.load(path, make)
    assert apart(found.state, again.state) == 0 == apart(found.shared, again.shared)
    assert again.history == found.history
    assert torch.equal(again.accuracy, found.accuracy)
    assert (again.method, again.head, again.global_accuracy) == ("atoms", ("5",), None)
    assert apart(state_of(again.model(2)), state_of(found.model(2))) == 0
    with pytest.raises(ValueError, match="another model"):
        Federated.load(path, lambda: nn.Linear(2, 2))


def test_what_is_wrong_is_said() -> None:
    clients = some_clients()
    with pytest.raises(ValueError, match="did you mean 'fedavg'"):
        simulate(make, clients, "fedavgg", **WAY)
    with pytest.raises(ValueError, match="fedprox has no option 'lam'; it has mu"):
        simulate(make, clients, "fedprox(lam=1)", **WAY)
    with pytest.raises(ValueError, match=r"share=0\.1 of 4 clients is 0\.4 of them, so nobody .* at least 0\.25"):
        simulate(make, clients, "fedavg", **{**WAY, "share": 0.1})
    with pytest.raises(ValueError, match="at most 1"):
        simulate(make, clients, "fedavg", **{**WAY, "share": 1.5})
    with pytest.raises(ValueError, match="simulate cannot train with clip=1"):
        simulate(make, clients, "fedavg", **{**WAY, "recipe": replace(RECIPE, clip=1.0)})
    plain = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()  # noqa: E731
    with pytest.raises(ValueError, match="only models made of atoms"):
        simulate(plain, clients, "atoms", **WAY)
    with pytest.raises(ValueError, match="labels go up to 2, but the model answers 2 classes: make it with at least 3"):
        simulate(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).double(), clients, "fedavg", **WAY)
    with pytest.raises(ValueError, match="no module 'fc' to be its head"):
        simulate(plain, clients, "fedper", **WAY, head="fc")
    with pytest.raises(ValueError, match="no linear layer to be its head"):
        simulate(lambda: nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()).double(), clients, "fedper", **WAY)
    with pytest.raises(ValueError, match=r"the part of a model must be one of .*got 'tail'"):
        simulate(make, clients, "fedavg(last='tail')", **WAY)
    with pytest.raises(IndexError):
        simulate(make, clients, "fedavg(last_epochs=0)", **{**WAY, "rounds": 0}).model(4)


@pytest.mark.parametrize("text", [{}, {"about": "["}, {"about": "{}"}, {"about": "[]"}])
def test_a_damaged_file_is_told(tmp_path: Any, text: dict[str, str]) -> None:
    save_file(
        {"accuracy": torch.zeros(1)}, tmp_path / "f.safetensors", {"format": "sosie-federated", "version": "2", **text}
    )
    with pytest.raises(DamagedFile, match="is damaged"):
        Federated.load(tmp_path / "f.safetensors", make)
