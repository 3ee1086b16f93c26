"""The layout: the spine imports in the order of the flow, rooms never import rooms, the door stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sosie

ROOT = Path(sosie.__file__).parent
SPINE = ["linalg", "models", "data", "capture", "stats", "measures", "results", "engine", "report"]
ROOMS = {"diffing", "stitching", "sketching", "weights", "history", "train", "benchmark", "zoo", "shapes", "rsa"}
STAND_ON_ROOMS = {"benchmark": {"stitching", "sketching", "weights", "history", "train"}}
STAND_ON_ROOMS["zoo"] = STAND_ON_ROOMS["benchmark"]
DOORS = {"cli", "web"}


def allowed(part: str) -> set[str]:
    """The folders that a folder may import; files beside the folders are for all."""
    if part in DOORS:
        return {*SPINE, *ROOMS, *DOORS}
    if part in ROOMS:
        return {*SPINE, *STAND_ON_ROOMS.get(part, ())} - {"report"}
    return {"results"} if part == "report" else set(SPINE[: SPINE.index(part)])


def imports(path: Path) -> set[str]:
    """The folders of sosie that a file imports."""
    found = set()
    parts = path.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            above = ["sosie", *parts[:-1]][: len(parts) + 1 - node.level] if node.level else []
            names = [*above, *(node.module or "").split(".")]
            names = [name for name in names if name]
            found |= {names[1]} if len(names) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("sosie.")}
    return {name for name in found if (ROOT / name).is_dir()}


def test_the_spine_is_in_order_and_rooms_stand_alone() -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in ROOT.rglob("*.py")
        if len(path.relative_to(ROOT).parts) > 1
        for part in [path.relative_to(ROOT).parts[0]]
        if (bad := imports(path) - allowed(part) - {part})
    }
    assert not wrong


def test_the_rule_can_fail() -> None:
    assert "engine" not in allowed("report")
    assert "stitching" not in allowed("engine")
    assert "train" not in allowed("sketching")
    assert "train" in allowed("benchmark")
    assert "stats" in imports(ROOT / "measures" / "kernels.py")


def test_no_room_has_the_name_of_a_function_at_the_door() -> None:
    assert not {*SPINE, *ROOMS, *DOORS} & set(sosie.__all__)


def test_the_door_is_small() -> None:
    assert len(sosie.__all__) <= 20  # the 18 of 0.2.0, `align` and `Running`
    for name in (*sosie.__all__, *SPINE, *ROOMS):  # `import sosie` is enough for sosie.train.Penalty
        assert getattr(sosie, name)


@pytest.mark.parametrize(
    "what", ["import sosie", "import sosie.cli.main", "import sosie.results", "import sosie.report"]
)
def test_torch_is_not_imported_before_it_is_needed(what: str) -> None:
    code = f"import sys; {what}; print([m for m in ('torch', 'matplotlib', 'scipy', 'pandas') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
