"""What a fingerprint costs beside the forward pass it needs: ResNet-50 at 224², 256 probes, its 16 blocks.

python bench/fingerprints.py [results.json]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sosie.engine.sources import ModelSource
from sosie.models import open_model
from sosie.zoo.fingerprints import Probe, fingerprint
from sosie.zoo.fingerprints.gram_vectors import gram_vectors

TIMES = 7


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds, the median of a few; the first, which warms up, aside."""
    found = []
    for _ in range(TIMES + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    named = open_model("resnet50")
    model = named.model.to(device).eval()
    images = torch.rand(256, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(device)
    probe = Probe.of(images)
    with torch.no_grad():
        forward = timed(lambda: model(images), device)
    source = ModelSource(model, "resnet50")
    vectors = timed(lambda: gram_vectors(source, probe), device)
    whole = timed(lambda: fingerprint(model, probe, kinds="cka"), device)
    found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "sites": len(fingerprint(model, probe, kinds="cka").sites),
        "forward_s": round(forward, 4),
        "exact_vectors_s": round(vectors, 4),
        "fingerprint_s": round(whole, 4),
        "exact_vectors_ratio": round(vectors / forward, 3),
        "fingerprint_ratio": round(whole / forward, 3),
    }
    text = json.dumps(found, indent=2)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
