"""Comma-separated lists whose items may have options in brackets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta


def split(text: str | None) -> list[str] | None:
    """Items of "a,b(k=1,l=2)": commas inside brackets do not separate; None stays None."""
    if text is None:
        return None
    items, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            items.append(text[start:place])
            start = place + 1
    items.append(text[start:])
    found = [item.strip() for item in items if item.strip()]
    if not found:
        raise ValueError(f"an empty list: {text!r}")
    return found


# Processes that torchrun started: they work together, and one of them speaks

STARTED_WITH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what every launcher of PyTorch's says
PATIENCE = timedelta(hours=24)  # for one that is slower; one that fails says so, and torchrun ends them all


@contextmanager
def working_together() -> Iterator[bool]:
    """Whether this process is the one to write and print: where it is alone, or the first of several."""
    if any(name not in os.environ for name in STARTED_WITH) or int(os.environ["WORLD_SIZE"]) < 2:
        yield True
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def own_device(device: str | None) -> str | None:
    """Of several processes of one machine each has a GPU of its own."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device
