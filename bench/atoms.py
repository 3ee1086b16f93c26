"""Filter atoms: the layer against a plain convolution, all pairs of many models, and what recording them costs."""

from __future__ import annotations

import argparse
import itertools
import resource
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from measuring import show, timed, wait, write
from torch import Tensor, nn

from sosie.history import Recorder
from sosie.models import AtomConv2d, alexnet, atom_layers
from sosie.stats import AtomTable
from sosie.train import Recipe, fit

CHANNELS, BATCH, SIDE, ATOMS = (16, 64, 128, 256), 64, 32, 9
CLIENTS = 120
MODELS, LAYERS = 100_000, 8
IMAGES = 1280
RECORDS = 20


def step(layer: nn.Module, x: Tensor, train: bool, steps: int, recorded: bool) -> Callable[[], None]:
    """Some forwards, or some whole steps of SGD; resident data, no copies.

    `recorded`: as a CUDA graph, so that what is timed is the work and not how fast Python asks for it.
    """
    optimiser = torch.optim.SGD(layer.parameters(), lr=1e-6)

    def once() -> None:
        if not train:
            with torch.no_grad():
                layer(x)
            return
        optimiser.zero_grad(set_to_none=True)
        layer(x).square().mean().backward()
        optimiser.step()

    graph = graph_of(once) if recorded else None

    def run() -> None:
        for _ in range(steps):
            once() if graph is None else graph.replay()
        wait()

    return run


def graph_of(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def layers(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """AtomConv2d over Conv2d, 3 × 3, channels to as many channels; the input needs a gradient, as inside a network."""
    found = []
    on_gpu = asked.device != "cpu"
    for way, batch, channels in itertools.product(
        ("recorded", "as written") if on_gpu else ("as written",), (asked.batch, 4 * asked.batch)[: 1 + on_gpu],
        asked.channels,
    ):  # fmt: skip
        x = torch.randn(batch, channels, asked.side, asked.side, device=asked.device)
        plain = nn.Conv2d(channels, channels, 3, padding=1, device=asked.device)
        atoms = AtomConv2d(channels, channels, 3, ATOMS, padding=1, device=asked.device)
        for what, train in (("training", True), ("inference", False)):
            given = x.clone().requires_grad_(train)
            steps = asked.steps * (10 if on_gpu else 1)
            recorded = way == "recorded"
            spent = timed(
                {
                    "plain": step(plain, given, train, steps, recorded),
                    "atoms": step(atoms, given, train, steps, recorded),
                },
                repeats=asked.repeats,
            )
            found.append(
                {"way": way, "batch": batch, "channels": channels, "step": what,
                 "plain, ms": 1e3 * spent["plain"] / steps, "atoms, ms": 1e3 * spent["atoms"] / steps,
                 "times": spent["atoms"] / spent["plain"]}
            )  # fmt: skip
    return found


def clients(count: int) -> list[dict[str, Tensor]]:
    """Atoms of five-layer AlexNets."""
    shapes = {name: layer.atoms.shape for name, layer in atom_layers(alexnet(atoms=ATOMS)).items()}
    random = torch.Generator().manual_seed(0)
    return [{name: torch.randn(shape, generator=random) for name, shape in shapes.items()} for _ in range(count)]


def one_by_one(models: list[dict[str, Tensor]]) -> Tensor:
    """As one would write it down: a cosine for each pair and layer."""
    found = torch.eye(len(models))
    for i, j in itertools.combinations(range(len(models)), 2):
        each = [nn.functional.cosine_similarity(x.flatten(), models[j][k].flatten(), 0) for k, x in models[i].items()]
        found[i, j] = found[j, i] = torch.stack(each).mean()
    return found


def all_pairs(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Every pair of clients, on one core."""
    models, threads = clients(asked.clients), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        table = AtomTable.of(models)
        spent = timed({"one product": table.cosines, "with the table": lambda: AtomTable.of(models).cosines()},
                      repeats=asked.repeats)  # fmt: skip
        spent |= timed({"loop over pairs": lambda: one_by_one(models)}, repeats=1, warm=False)
        apart = float((table.cosines() - one_by_one(models)).abs().max())
    finally:
        torch.set_num_threads(threads)
    pairs = len(models) * (len(models) - 1) // 2
    rows = [{"way": way, "pairs": pairs, "ms": 1e3 * s, "times": s / spent["one product"]} for way, s in spent.items()]
    print(f"largest difference: {apart:.1e}")
    return rows


def to_one(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """All similarities to one model; the table holds nothing but the atoms, 9 of 3 × 3 a layer."""
    random = torch.Generator(asked.device).manual_seed(0)
    stacked = {
        f"layer{k}": torch.randn(asked.models, ATOMS, 3, 3, generator=random, device=asked.device)
        for k in range(LAYERS)
    }
    table = AtomTable.stacked(stacked)
    bytes_of_atoms = sum(atoms.numel() * atoms.element_size() for atoms in stacked.values())
    del stacked
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent = timed({"": lambda: table.nearest(0)}, repeats=asked.repeats)[""]
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return [
        {"models": asked.models, "layers": LAYERS, "ms": 1e3 * spent, "atoms, MB": bytes_of_atoms / 1e6,
         "table, MB": table.rows.numel() * table.rows.element_size() / 1e6, "more while asked, MB": grown / 1e6}
    ]  # fmt: skip


def recording(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A record of AlexNet's atoms, against a step and an epoch of its training."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(asked.images, 3, 32, 32, generator=random).to(asked.device)
    labels = torch.randint(10, (asked.images,), generator=random).to(asked.device)
    model = alexnet(atoms=ATOMS, dropout=0).to(asked.device)
    numbers = itertools.count()

    def epoch() -> None:
        fit(model, images, labels, recipe=Recipe(epochs=1, rate=1e-4), seed=0)
        wait()

    with tempfile.TemporaryDirectory() as folder, Recorder(folder, model, what="atoms") as recorder:

        def record() -> None:
            for _ in range(RECORDS):
                recorder.record(next(numbers))
            wait()

        spent = timed({"epoch": epoch, "record": record}, repeats=asked.repeats)
    one, steps = spent["record"] / RECORDS, -(-asked.images // 64)
    return [{"images an epoch": asked.images, "epoch, s": spent["epoch"], "step, ms": 1e3 * spent["epoch"] / steps,
             "record, ms": 1e3 * one, "share of an epoch": one / spent["epoch"],
             "share of a step": one * steps / spent["epoch"]}]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--channels", type=int, nargs="+", default=list(CHANNELS))
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--models", type=int, default=MODELS)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    found = {}
    for measure in (layers, all_pairs, to_one, recording):
        title = str(measure.__doc__).partition("\n")[0]
        if rows := measure(asked):
            found[title] = rows
            show(title, rows)
    full = all(
        getattr(asked, name) == parser.get_default(name) for name in vars(asked) if name not in ("device", "steps")
    )
    if full:
        write("atoms" if asked.device == "cpu" else "atoms-gpu", {"what": __doc__, **found})


if __name__ == "__main__":
    main()
