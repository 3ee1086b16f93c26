"""What a fingerprint costs beside the forward pass it needs: ResNet-50, its 16 blocks, 256 images of 224²."""

from __future__ import annotations

import argparse

import torch
from measuring import show, timed, write

from sosie.engine.network import Network
from sosie.linalg import gram_cuda
from sosie.models import open_model
from sosie.zoo import Probe, fingerprint
from sosie.zoo.fingerprints import SIZE, cka_vectors

IMAGES = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=IMAGES, help="fewer are tried, and nothing is written")
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = open_model("resnet50").model.to(device).eval()
    images = torch.rand(asked.images, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(device)
    probe, source = Probe.of(images), Network(model, "resnet50")

    @torch.no_grad()
    def forward() -> None:
        model(images)

    ways = {
        "bare forward pass": forward,
        "with exact vectors": lambda: cka_vectors(source, probe, SIZE, 0, None, []),
        "the whole fingerprint": lambda: fingerprint(model, probe, kinds="cka"),
    }
    spent = timed(ways, repeats=asked.repeats)
    rows = [
        {"way": way, "ms": 1000 * spent[way], "of the pass": spent[way] / spent["bare forward pass"]} for way in ways
    ]
    show(f"ResNet-50, {asked.images} images, on {device}", rows)
    if device == "cuda" and asked.images == IMAGES:
        by = "the kernel" if gram_cuda.available("first") else "plain products"
        write("fingerprints-gpu", {"what": __doc__, "Gram matrices": by, "rows": rows})


if __name__ == "__main__":
    main()
