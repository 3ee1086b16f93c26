"""Train the networks of Similarity of Neural Networks with Gradients (Tang et al. 2020): those that are not there yet.

    python papers/gradients/train.py --device cuda --workers 2     # all of them
    python papers/gradients/train.py --only cifar10,mnist
    python papers/gradients/train.py --small                       # a smoke run on a CPU: its numbers mean nothing

SOSIE_DATA names the folders with the images; of two packs of one set, the one in the folder named first is taken.
Each network is saved when it is trained, and results/networks.json written again: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from networks import CHECKPOINTS, checkpoint, read_record, trained
from settings import DATA_SETS, Settings, small

from sosie.files import write_atomically

PAPER = Path(__file__).resolve().parent
Network = tuple[str, str, int]  # data set, architecture, seed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the networks that papers/gradients compares.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", type=Path, help="the folder of the checkpoints")
    parser.add_argument("--results", type=Path, help="the folder to write networks.json to")
    parser.add_argument("--only", default="", help=f"comma-separated, of {', '.join(DATA_SETS)}, resnet18, resnet50")
    parser.add_argument("--workers", type=int, default=1, help="networks trained side by side, a process each")
    parser.add_argument("--small", action="store_true", help="a smoke run: its numbers mean nothing")
    given = parser.parse_args()
    given.only = {name.strip() for name in given.only.split(",") if name.strip()}
    known = {*DATA_SETS, "resnet18", "resnet50"}
    if unknown := sorted(given.only - known):
        parser.error(f"nothing is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if given.workers < 1:
        parser.error(f"--workers is a number from 1 up, got {given.workers}")
    given.results = given.results or PAPER / ("small" if given.small else "results")
    given.cache = (given.cache or (given.results / "nets" if given.small else CHECKPOINTS)).resolve()
    return given


def wanted(only: set[str], settings: Settings) -> list[Network]:
    """What is named, of data sets and of architectures; where none of a kind is named, all of it."""
    found = settings.networks()
    for kind in (0, 1):
        named = only & {str(network[kind]) for network in found}
        found = [network for network in found if not named or network[kind] in named]
    return found


def train(network: Network, device: str, cache: Path, settings: Settings) -> str | None:
    """One network; what went wrong as text, for the others go on."""
    torch.backends.cudnn.benchmark = True  # all batches but the last of an epoch have one shape
    try:
        trained(*network, device, cache=cache, settings=settings)
    except Exception:
        return traceback.format_exc()
    return None


def train_all(
    networks: list[Network], workers: int, device: str, cache: Path, settings: Settings
) -> Iterator[tuple[Network, str | None]]:
    """Each network and what went wrong, as they are done."""
    if workers == 1:
        for network in networks:
            yield network, train(network, device, cache, settings)
        return
    # Spawned, not forked: a fork cannot use CUDA.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        started = {pool.submit(train, network, device, cache, settings): network for network in networks}
        for done in as_completed(started):
            yield started[done], str(done.exception()) if done.exception() else done.result()


def write_results(path: Path, cache: Path, settings: Settings, is_small: bool) -> None:
    """All networks of these settings that are in the cache, whichever run trained them."""
    rows = []
    for dataset, architecture, seed in settings.networks():
        file = checkpoint(settings.recipe(dataset, architecture), seed, cache)
        if file.is_file():
            rows.append({**read_record(file), "file": file.name})
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[f"{row['dataset']}_{row['architecture']}_accuracy"].append(row["accuracy"])
    numbers: dict[str, Any] = {name: fmean(values) for name, values in groups.items()}
    whole = {"experiment": "networks", "small": is_small, "numbers": numbers, "networks": rows}
    write_atomically(path, json.dumps(whole, indent=1) + "\n")


def main() -> None:
    given = parse()
    settings = small(Settings()) if given.small else Settings()
    networks = wanted(given.only, settings)
    results = given.results / "networks.json"
    failed = []
    print(f"{'data set':9} {'network':9} {'seed':>4}  {'accuracy':>8}  {'seconds':>7}  trained on", flush=True)
    for network, trouble in train_all(networks, given.workers, given.device, given.cache, settings):
        dataset, architecture, seed = network
        start = f"{dataset:9} {architecture:9} {seed:4}  "
        if trouble:
            failed.append(f"{dataset} {architecture} {seed}")
            print(f"{start}failed\n{trouble}", flush=True)
            continue
        row = read_record(checkpoint(settings.recipe(dataset, architecture), seed, given.cache))
        print(f"{start}{row['accuracy']:8.4f}  {row['seconds']:7.1f}  {row['trained_on']}", flush=True)
        write_results(results, given.cache, settings, given.small)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
