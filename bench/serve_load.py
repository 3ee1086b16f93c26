"""Many readers of the explorer at once: `sosie serve` in a process of its own, asked over loopback without a pause.

Each client asks, waits for the answer, and asks again: pages of the list with a random part of a name, a random model's
page and its nearest, nearest layers, random pairs from the whole vectors, the map, and the front end's files. Most
answers have not been asked for before, so that they are worked out and not remembered.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sosie.zoo import Fingerprint, Probe, Zoo
from sosie.zoo.fingerprints import project

WHAT = """Clients that ask `sosie serve` over loopback, each again as soon as it is answered, and share the machine with
it: milliseconds until the last byte of an answer. *errors*: answers other than 200, or none. The map was asked for once
before; what it took is *first map*."""
N, SITES, SIZE = 64, 10, 256
PROBE = torch.arange(N * 4, dtype=torch.float32).reshape(N, 4)
FILES = ("", "app.js", "map.js", "explorer.css")


def fill(folder: Path, models: int) -> None:
    """A zoo of models in families of ten."""
    zoo = Zoo(folder, PROBE, size=SIZE, kinds=("cka",))
    probe, random_ = Probe.of(PROBE), np.random.default_rng(0)
    base = np.empty(0)
    prints = {}
    for k in range(models):
        own = random_.normal(size=(SITES, N * (N - 1) // 2))
        base = own if k % 10 == 0 else base
        exact = base + 0.5 * own
        exact = (exact / np.linalg.norm(exact, axis=1, keepdims=True)).astype(np.float32)
        about = {"architecture": f"Net{k % 7}", "parameters": k, "model": f"{k:016x}"}
        labels = {"cka": tuple(f"layer{site}" for site in range(SITES))}
        vectors = {"cka": project(torch.from_numpy(exact), SIZE, 0).numpy()}
        prints[f"family{k // 10}-{k % 10}"] = Fingerprint(
            probe.digest, N, SIZE, 0, "flatten", vectors, labels, exact, {}, about
        )
    zoo.add(prints)


def question(draw: random.Random, models: int) -> tuple[str, str]:
    """What is asked, and the path."""
    a, b = draw.randint(1, models), draw.randint(1, models)
    return draw.choices(
        [
            ("file", "/" + draw.choice(FILES)),
            ("list", f"/api/models?text={draw.randint(0, models // 10)}&offset={draw.randint(0, 20)}"),
            ("model", f"/api/models/{a}"),
            ("near", f"/api/models/{a}/near"),
            ("layers", f"/api/models/{a}/near?by=layer&site=layer{draw.randint(0, SITES - 1)}"),
            ("pair", f"/api/pairs/{a}/{b}?exact=true"),
            ("map", "/api/map"),
        ],
        [25, 20, 15, 15, 5, 15, 5],
    )[0]


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> tuple[int, bytes]:
    """One question over a connection that stays open."""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
    return int(head.split()[1]), await reader.readexactly(int(length[1]) if length else 0)


async def client(
    port: int, draw: random.Random, models: int, until: float, seen: list[Any], wrong: Counter[str]
) -> None:
    connection = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        what, path = question(draw, models)
        start = time.perf_counter()
        try:
            status, _ = await asyncio.wait_for(ask(*connection, path), 30)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            wrong[f"{what}: {type(error).__name__}"] += 1
            connection = await asyncio.open_connection("127.0.0.1", port)
            continue
        seen.append((what, 1000 * (time.perf_counter() - start)))
        if status != 200:
            wrong[f"{what}: {status}"] += 1
    connection[1].close()


async def load(port: int, clients: int, seconds: float, models: int) -> dict[str, Any]:
    start = time.perf_counter()
    connection = await asyncio.open_connection("127.0.0.1", port)
    await ask(*connection, "/api/map")
    first_map = time.perf_counter() - start
    seen: list[tuple[str, float]] = []
    wrong: Counter[str] = Counter()
    until = time.perf_counter() + seconds
    await asyncio.gather(*(client(port, random.Random(k), models, until, seen, wrong) for k in range(clients)))
    rows = []
    for what in ("all", *sorted({what for what, _ in seen})):
        took = np.array([ms for kind, ms in seen if what in ("all", kind)])
        low, middle, high, most = np.percentile(took, [50, 95, 99, 100])
        rows.append(
            {"asked": what, "answers": len(took), "median": low, "p95": middle, "p99": high, "longest": most}
        )  # fmt: skip
    return {
        "clients": clients, "seconds": seconds, "models": models, "errors": sum(wrong.values()), "wrong": dict(wrong),
        "per second": len(seen) / seconds, "first map": first_map, "rows": rows,
    }  # fmt: skip


def main() -> None:
    from measuring import show, write

    options = argparse.ArgumentParser()
    options.add_argument("--clients", type=int, default=50)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--models", type=int, default=2000)
    given = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder) / "zoo", given.models)
        command = [sys.executable, "-m", "sosie", "serve", str(Path(folder) / "zoo"), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                found = re.search(r":(\d+)/", server.stdout.readline())
                assert found, "the server did not say where it is"
                result = asyncio.run(load(int(found[1]), given.clients, given.seconds, given.models))
            finally:
                server.terminate()
    rows = result.pop("rows")
    show("milliseconds until an answer", rows)
    show("in all", [{name: value for name, value in result.items() if name != "wrong"}])
    if result["wrong"]:
        print(result["wrong"])
    if (given.clients, given.seconds, given.models) == (50, 60, 2000):  # else it was a try
        write("serve-load", {"what": WHAT, **result, "rows": rows})


if __name__ == "__main__":
    main()
