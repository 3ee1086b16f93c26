"""Install a wheel in a clean environment, away from the repository, and try it: `python try_wheel.py dist/*.whl`.

The environment is of the Python that runs this, in a temporary folder. First sosie alone, then with its extras.
PIP_CONSTRAINT and the like hold for what is installed; --keep shows what a failure left.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

EXTRAS = "plots,images,pandas,transport,hf,topology,zoo,dask,web"
ALONE = """
import sys, pathlib, torch, numpy as np, sosie
from sosie.models import small_cnn
assert pathlib.Path(sosie.__file__).is_relative_to(sys.prefix), sosie.__file__
images = torch.rand(64, 1, 28, 28)
c = sosie.compare(small_cnn(), small_cnn(), images, measures=["debiased_cka", "procrustes_angle"])
assert sosie.load(c.save("c.json")).matrix("debiased_cka").shape == c.matrix("debiased_cka").shape
assert "<html" in sosie.write_report(c, "c.html").read_text("utf-8")
assert 0 < sosie.measure("linear_cka", np.random.rand(50, 5), np.random.rand(50, 7)) < 1
"""
WITHOUT_EXTRAS = """
import sosie
from sosie.report import write_plots
for ask in (lambda: sosie.load("c.json").to_pandas(), lambda: write_plots(sosie.load("c.json"), "c.svg")):
    try:
        ask()
    except ImportError as error:
        assert "pip install 'sosie[" in str(error), error
    else:
        raise AssertionError("what an extra is for was done without it")
"""
WITH_EXTRAS = """
import numpy as np, sosie
from sosie.report import write_plots
from PIL import Image
assert len(sosie.load("c.json").to_pandas())
assert all(path.stat().st_size for path in write_plots(sosie.load("c.json"), "c.svg"))
for k in range(8):
    Image.fromarray(np.random.default_rng(k).integers(0, 255, (32, 32, 3), np.uint8)).save(f"photos/{k}.png")
x, y = np.random.rand(40, 5), np.random.rand(40, 7)
print(sosie.measure("soft_match_distance", x, y), sosie.measure("rtd", x, y))
import transformers, fastapi, faiss, distributed
from sosie.web.app import FOLDER
assert (FOLDER / "index.html").is_file() and (FOLDER / "app.js").is_file()
"""
VERBS_ALONE = (
    "--help",
    "demo --epochs 1",
    "compare small_cnn@demo-a.safetensors small_cnn@demo-b.safetensors --data demo --max-rows 64 --html d.html",
    "measures",
    "zoo init nets --data demo --max-rows 32",
    "zoo add nets a=small_cnn@demo-a.safetensors b=small_cnn@demo-b.safetensors",
    "zoo search nets a",
    "zoo list nets",
)
VERBS_WITH_EXTRAS = (
    "compare resnet20 resnet20 --data folder:photos",
    "report c.json --plot maps.svg",
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("wheel", type=Path)
    options.add_argument("--without-extras", action="store_true", help="sosie alone; the extras are large")
    chosen = options.parse_args()
    wheel = chosen.wheel.resolve()
    with tempfile.TemporaryDirectory(prefix="sosie-wheel-") as folder:
        made = Environment(Path(folder), wheel)
        made.install(str(wheel))
        made.check(ALONE, VERBS_ALONE)
        made.check(WITHOUT_EXTRAS)
        made.tell("alone")
        if not chosen.without_extras:
            (made.work / "photos").mkdir()
            made.install(f"{wheel}[{EXTRAS}]")
            made.check(WITH_EXTRAS, VERBS_WITH_EXTRAS)
            made.tell(f"with {EXTRAS}")


class Environment:
    """A virtual environment, and a folder to work in that holds nothing of the repository."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.work, self.bin, self.version = folder / "work", folder / "venv" / "bin", wheel.name.split("-")[1]
        self.work.mkdir()
        venv.create(folder / "venv", with_pip=True)
        self.surroundings = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]], cwd=self.work, env=self.surroundings, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout}\nfailed with Python {sys.version.split()[0]}")
        return done.stdout

    def install(self, what: str) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what)

    def check(self, code: str, verbs: tuple[str, ...] = ()) -> None:
        self.run("python", "-c", code)
        assert self.run("sosie", "--version").strip() == f"sosie {self.version}"
        for verb in verbs:
            self.run("sosie", *verb.split())

    def tell(self, what: str) -> None:
        versions = dict(re.findall(r"^(\S+) +(\S+)$", self.run("python", "-m", "pip", "list"), flags=re.M))
        found = ", ".join(f"{name} {versions[name]}" for name in ("torch", "numpy", "transformers") if name in versions)
        print(f"Python {sys.version.split()[0]}: sosie {self.version} works {what} ({found})", flush=True)


if __name__ == "__main__":
    main()
