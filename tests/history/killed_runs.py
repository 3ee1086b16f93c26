"""Run by a test: records in child processes, kills each with SIGKILL, and looks at what is left.

Prints one line of JSON. The children are forked, so that a dozen kills do not take a dozen imports of torch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

from sosie.history import Recorder, open_run

torch.set_num_threads(1)
warnings.simplefilter("ignore")
KILLS = 12
SIZE = 1500  # 9 MB a record: time enough to be killed in the middle of one


def network(step: int) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE, bias=False))
    torch.nn.init.constant_(model[0].weight, float(step))
    return model


def record_until_killed(folder: Path) -> None:
    model = network(0)
    recorder = Recorder(folder, model, "weights")
    step = recorder.steps[-1] + 1 if recorder.steps else 0
    while True:
        model[0].weight.data.fill_(float(step))
        recorder.record(step)
        step += 1


def size(folder: Path) -> int:
    path = folder / "records"
    return path.stat().st_size if path.is_file() else 0


def main(folder: Path) -> None:
    chance = random.Random(0)
    torn, kept = 0, 0
    for k in range(KILLS):
        before = size(folder)
        child = os.fork()
        if child == 0:
            try:
                record_until_killed(folder)
            finally:
                os._exit(1)
        patience = time.monotonic() + 20
        while time.monotonic() < patience and size(folder) <= before and chance.random() > 1e-5:
            pass  # the file begins to grow in the middle of a write
        if k % 3 == 0:
            time.sleep(chance.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status
        if not (folder / "run.json").is_file():
            continue  # killed before it began
        run = open_run(folder)
        assert run.steps == list(range(len(run.steps))), run.steps
        assert len(run.steps) >= kept, (run.steps, kept)
        kept, torn = len(run.steps), torn + (run.note is not None)
        for step in (0, kept - 1) if kept else ():
            assert torch.equal(run.tensor(step, "0"), torch.full((SIZE, SIZE), float(step)))
        if kept > 20:  # keep the file small
            with Recorder(folder, network(0), "weights") as recorder:
                recorder.resume(5)
            kept = len(open_run(folder).steps)
    print(json.dumps({"kills": KILLS, "kept": kept, "torn": torn}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
