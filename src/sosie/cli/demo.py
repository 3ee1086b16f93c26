"""`sosie demo`: train two small networks, compare them and stitch them layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt


def demo(
    out: Annotated[Path, opt.file("The page to write.", opt.PAGE)] = Path("demo.html"),
    epochs: Annotated[int, opt.option(opt.RUN, "N", "Passes over the 2,000 training images.", min=1)] = 10,
    seed: Annotated[int, opt.option(opt.RUN, "N", "Seed of the first network; the second has the next.", min=0)] = 0,
) -> None:
    """See what sosie does, with two small networks trained in a minute.

    $ sosie demo
    $ sosie demo --epochs 3 --out trial.html

    The networks are compared and stitched, and stay as demo-a.safetensors and demo-b.safetensors beside the pages: the
    models `small_cnn@demo-a.safetensors` and `small_cnn@demo-b.safetensors` in the examples of the other verbs.
    """
    from ..data import open_images
    from ..engine import compare
    from ..files import write_weights
    from ..models import open_model
    from ..report import print_comparison, write_report
    from ..stitching import stitch_sites
    from ..train import Recipe, accuracy, fit

    train, test = (open_images("demo", split=split) for split in ("train", "test"))
    images, labels = train.read(0, len(train))
    test_images, test_labels = test.read(0, len(test))
    typer.echo(f"Two networks, the same {len(train)} images of clothes, different seeds:")
    networks = []
    for k in (seed, seed + 1):
        network = open_model(f"small_cnn(seed={k})")
        fit(network.model, images, labels, recipe=Recipe(epochs=epochs), seed=k, task=f"training {network.name}")
        typer.echo(
            f"  {network.name}: {accuracy(network.model, test_images, test_labels):.1%} of {len(test)} test images"
        )
        networks.append(network)
    written = [out.with_name(f"{out.stem}-{letter}.safetensors") for letter in "ab"]
    for network, path in zip(networks, written, strict=True):
        write_weights(path, network.model.state_dict())
    result = compare(networks, test.batches(250), measures=["debiased_cka", "procrustes_angle", "mutual_knn"])
    written += [result.save(out.with_suffix(".json")), write_report(result, out)]
    print_comparison(result)
    typer.echo("\nCan the second do its job with what the first represents?")
    stitched = stitch_sites(networks[0], networks[1], train.batches(250), test=test.batches(250))
    written.append(write_report(stitched, out.with_name(f"{out.stem}-stitched{out.suffix}")))
    print_comparison(stitched)
    typer.echo("\n".join(f"wrote {path}" for path in written) + "\nOpen the pages in a browser.")
