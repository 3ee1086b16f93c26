"""A Dask cluster as an executor: what its workers make is written by the process that asked."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

PATIENCE = 30  # seconds to reach the scheduler


@contextmanager
def dask_cluster(address: str) -> Iterator[Executor]:
    """The cluster whose scheduler is at an address such as tcp://host:8786, or in a scheduler file (.json).

    A task whose worker dies is given to another by the scheduler, up to `distributed.scheduler.allowed-failures`
    times (3 by default); then it is given up, and the model is recorded as failed.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ImportError("a Dask cluster needs Dask: pip install 'sosie[dask]'") from None
    where = {"scheduler_file": address} if address.endswith(".json") else {"address": address}
    try:
        client = Client(**where, timeout=PATIENCE)
    except (OSError, ValueError) as error:  # nobody answers; no address
        raise OSError(f"no Dask scheduler at {address}: {error}") from error
    # Not pure: a task that is tried again is another one, not the one that failed, remembered.
    with client, client.get_executor(pure=False) as executor:
        yield executor
