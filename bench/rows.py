"""Memory does not grow with the rows, and time grows in proportion: Tiny-10 with itself, all leaf modules."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from measuring import high_water, show, write

COUNTS = (1024, 2048, 4096, 8192)


def child(count: int) -> None:
    """One comparison in a process of its own, whose peak memory is then known."""

    import torch

    import sosie
    from sosie.models import open_model

    models = [open_model(f"tiny10(seed={k})").model for k in (0, 1)]

    def batches(total: int):
        random = torch.Generator().manual_seed(0)
        for _ in range(total // 256):
            yield torch.rand(256, 3, 32, 32, generator=random)

    sosie.compare(*models, batches(512))
    start = time.perf_counter()
    sosie.compare(*models, batches(count))
    seconds = time.perf_counter() - start
    peak = high_water() / 1024
    print(json.dumps({"rows": count, "seconds": seconds, "ms a row": 1e3 * seconds / count, "peak MiB": peak}))


def main() -> None:
    rows = []
    for count in COUNTS:
        found = subprocess.run([sys.executable, __file__, str(count)], capture_output=True, text=True, check=True)
        rows.append(json.loads(found.stdout.splitlines()[-1]))
    show("Tiny-10 x Tiny-10, 17 x 17 leaf modules, debiased CKA, CPU", rows)
    write("rows", {"what": __doc__, "rows": rows})


if __name__ == "__main__":
    child(int(sys.argv[1])) if len(sys.argv) > 1 else main()
