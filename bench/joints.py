"""50 stitching layers trained together against one, on a GPU: seconds an epoch.

Random weights and images, which cost as much as others: two Tiny-10s and two CIFAR ResNet-20s, 32 x 32 images.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from measuring import machine, show, wait, write
from torch import nn

import sosie
from sosie.models import open_model

IMAGES, BATCH = 5120, 128
PAIRS = {
    "tiny10": ["bn1", "bn3", "bn6", "bn8"],
    "resnet20": ["layer1.0", "layer2.0", "layer3.0"],
}


def model_of(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = open_model(name).model
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def seconds(a: nn.Module, b: nn.Module, site: str, data: Any, joints: int, epochs: int, **options: Any) -> float:
    written = "".join(f", {key}={value!r}" for key, value in options.items())
    ways = [f"task_loss(start='random', seed={k}, epochs={epochs}, record=0{written})" for k in range(joints)]
    wait()
    start = time.perf_counter()
    sosie.stitch(a, site, b, site, data, fit=ways)
    wait()
    return time.perf_counter() - start


def an_epoch(*args: Any, few: int, many: int, **options: Any) -> float:
    """Seconds an epoch takes, without reading, cutting and the pass over the data: what more epochs take more."""
    return (seconds(*args, many, **options) - seconds(*args, few, **options)) / (many - few)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--joints", type=int, default=50)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--epochs", type=int, nargs=2, default=(2, 6))
    parser.add_argument("--autocast", action="store_true")
    asked = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    few, many = asked.epochs
    rows = []
    for name, sites in PAIRS.items():
        a, b = (model_of(name, seed) for seed in (0, 1))
        data = [(torch.rand(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))) for _ in range(asked.images // BATCH)]
        for site in sites:
            for autocast in (False, True):
                seconds(a, b, site, data, asked.joints, 1, autocast=autocast)  # warms up
                one, all_ = (
                    an_epoch(a, b, site, data, joints, few=few, many=many, autocast=autocast)
                    for joints in (1, asked.joints)
                )
                rows.append({"pair": name, "site": site, "bfloat16": str(autocast), "one, s": one})
                rows[-1] |= {f"{asked.joints} together, s": all_, "times": all_ / one}
                print(rows[-1], flush=True)
    show(f"{asked.joints} joints trained together, an epoch of {asked.images} images, batches of {BATCH}", rows)
    if torch.cuda.is_available():
        write("joints", {"what": __doc__, "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
