"""A layer imports only layers to its left; `report` sees results only; the door stays small and light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sosie

ROOT = Path(sosie.__file__).parent
# Who may import whom: everything below one's own number; `results` and `progress` are at the bottom.
LAYERS = {
    "progress": 0, "factory": 0, "process_state": 0, "linalg": 0, "results": 0, "models": 0, "data": 0,
    "capture": 1, "stats": 1, "measures": 2, "train": 3, "engine": 4, "zoo": 5, "report": 5, "web": 6, "cli": 7,
}  # fmt: skip
# Neighbours that a layer-0 part may use: files that are theirs to share, never each other's insides.
BESIDE = {
    "linalg": {"factory", "process_state"},
    "models": {"linalg", "results", "factory", "process_state"},
    "data": {"results", "factory", "process_state"},
    "capture": {"linalg", "results", "process_state"},
    "stats": {"linalg", "results"},
    "report": {"results"},
}


def imports(path: Path) -> set[str]:
    """The parts of sosie that a file imports."""
    found = set()
    depth = len(path.relative_to(ROOT).parts)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == depth:  # from ..x import y, seen from a part; from .x in a file at the top
                found |= {module.split(".")[0]} if module else {alias.name for alias in node.names}
            elif node.level == 0 and module.split(".")[0] == "sosie":
                found |= {module.split(".")[1]} if "." in module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("sosie.")}
    return found - {"__version__"}


def violations(part: str, used: set[str]) -> set[str]:
    if part in BESIDE:
        allowed = BESIDE[part]
    else:
        allowed = {name for name, layer in LAYERS.items() if layer < LAYERS[part]}
    return {name for name in used if name != part and name in LAYERS and name not in allowed}


FILES = [p for p in sorted(ROOT.rglob("*.py")) if len(p.relative_to(ROOT).parts) > 1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_layer_imports_only_layers_to_its_left(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0]
    assert part in LAYERS, f"{part} has no place in the flow: add it to LAYERS"
    assert not violations(part, imports(path)), f"{path.relative_to(ROOT)} imports {violations(part, imports(path))}"


def test_the_rule_can_fail() -> None:
    assert violations("report", {"engine"}) == {"engine"}
    assert violations("measures", {"engine", "stats"}) == {"engine"}
    assert violations("linalg", {"stats"}) == {"stats"}
    assert violations("models", {"data"}) == {"data"}
    assert "stats" in imports(ROOT / "measures" / "kernels.py")


def test_the_door_is_small() -> None:
    assert len(sosie.__all__) <= 15
    for name in sosie.__all__:
        assert getattr(sosie, name)


@pytest.mark.parametrize(
    "what", ["import sosie", "import sosie.cli.main", "import sosie.results", "import sosie.report"]
)
def test_torch_is_not_imported_before_it_is_needed(what: str) -> None:
    code = f"import sys; {what}; print([m for m in ('torch', 'matplotlib', 'scipy', 'pandas') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
