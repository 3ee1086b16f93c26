"""Run by a test: trains in child processes with a checkpoint, kills each with SIGKILL, until one is through.

Prints one line of JSON. The children are forked, so that many kills do not take as many imports of torch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # which the first optimiser would import in every child
from safetensors.torch import load_file, save_file
from small_training import energy, images, network, numbers, same

from sosie.train import Attached, Augment, Recipe, fit

torch.set_num_threads(1)
EPOCHS = 8


def train(seed: int, checkpoint: Path | None) -> dict[str, torch.Tensor]:
    """All that has a past; a network begun with another seed goes on as the one in the file."""
    x, y = images()
    model = network(seed)
    model.register_buffer("ballast", torch.zeros(1_000_000))  # a while to write
    with Attached(model, "0", energy, every=4, weight=0.1) as penalty:
        fit(
            model,
            x,
            y,
            recipe=Recipe(epochs=EPOCHS, batch=40, average=0.9, augment=Augment(pad=1)),
            seed=0,
            penalty=penalty,
            checkpoint=checkpoint,
        )
    return numbers(model)


def main(folder: Path) -> None:
    folder.mkdir()
    checkpoint, result = folder / "training.safetensors", folder.with_name("result.safetensors")
    chance, kills, torn = random.Random(0), 0, 0
    for attempt in range(100):
        before = written(checkpoint)
        child = os.fork()
        if child == 0:
            try:
                # Until there is a file to go on from, each begins as the first did.
                save_file(train(seed=attempt if before else 0, checkpoint=checkpoint), result)
                os._exit(0)
            finally:
                os._exit(1)
        # Every other one while it writes; those between after they have written, so that there is an end to it.
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if any(folder.glob(".*.part")) if attempt % 2 else written(checkpoint) != before:
                time.sleep(0 if attempt % 2 else chance.random() * 0.03)
                os.kill(child, signal.SIGKILL)
                done = os.waitpid(child, 0)
                break
            time.sleep(5e-4)
        torn += any(folder.glob(".*.part"))
        if os.WIFSIGNALED(done[1]):
            kills += 1
        elif os.WEXITSTATUS(done[1]) == 0:
            break
        else:
            raise SystemExit("a child failed")
    found = same(train(seed=0, checkpoint=None), load_file(result))
    left = sorted(path.name for path in folder.iterdir())
    print(json.dumps({"same": found, "kills": kills, "torn": torn, "left": left}))


def written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "training")
