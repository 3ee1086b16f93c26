"""Every example of the README and of the docs runs as written, and pages made from the code are up to date."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock
from urllib.parse import unquote

import pytest
import torch

from sosie.measures import MEASURES

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ("measures", "speed", "reference", "benchmark")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# A comment before a block, the block, and the text block that says what it prints.
BLOCK = re.compile(
    r"(?:<!-- (?P<comment>[^>]*?) -->\n)?^```(?P<kind>python|console)\n(?P<code>.*?)^```$"
    r"(?:\n\n```text\n(?P<output>.*?)^```$)?",
    flags=re.S | re.M,
)


@dataclass(frozen=True)
class Block:
    """An example: its code, what it is said to print, and why it is not run (empty: it is)."""

    kind: str
    code: str
    output: str
    excuse: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    for found in BLOCK.finditer(text):
        excuse = found["comment"] if (found["comment"] or "").startswith("not run") else ""
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(found["kind"], found["code"], found["output"] or "", excuse, line)


def run_page(path: Path, namespace: dict[str, Any]) -> None:
    """Run a page's examples from the first to the last, in one namespace."""
    for block in blocks(path.read_text("utf-8")):
        if block.excuse:
            continue
        if block.kind == "console":
            _run_console(block, f"{path.name}:{block.line}")
            continue
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        _check_output(block.output, printed.getvalue(), f"{path.name}:{block.line}")


def _run_console(block: Block, where: str) -> None:
    from typer.testing import CliRunner

    from sosie.cli.main import app

    for step in re.split(r"^\$ ", block.code, flags=re.M)[1:]:
        command, _, output = step.partition("\n")
        words = shlex.split(command, comments=True)
        assert words[0] == "sosie", f"{where}: {command!r} is no command of sosie; say why it is not run"
        found = CliRunner().invoke(app, words[1:])
        assert found.exit_code == 0, f"{where}: {command}: {found.output} {found.exception!r}"
        _check_output(output, found.output, where)


def _check_output(said: str, printed: str, where: str) -> None:
    """Every line that is said to be printed is, but for spaces; … stands for lines left out."""
    lines = {" ".join(line.split()).replace("[ ", "[") for line in printed.splitlines()}
    for line in said.splitlines():
        wanted = " ".join(line.split()).replace("[ ", "[")
        assert wanted in ("", "…") or wanted in lines, f"{where} says {wanted!r}, but it printed {printed}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_examples_run_as_written(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem in ("transformers", "gallery"):
        pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sosie[hf]'")
    if path.stem == "flower":
        pytest.importorskip("flwr", reason="flwr has an environment of its own: make test-flower")
    if path.stem == "explorer":
        pytest.importorskip("fastapi", reason="the explorer needs sosie[web]")
        pytest.importorskip("httpx2", reason="starlette's test client needs httpx2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Pages may add measures of their own.
    with torch.random.fork_rng(), warnings.catch_warnings(), mock.patch.dict(MEASURES):
        warnings.filterwarnings("error", ".* is called .* now", FutureWarning)  # names of before
        run_page(path, {"__name__": "__main__"})


def test_examples_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(2)\n```\n\n```text\n1\n```\n", "utf-8")
    with pytest.raises(AssertionError, match=r"page\.md:2 says '1'"):
        run_page(page, {})
    page.write_text("```console\n$ sosie measures --nothing\n```\n", "utf-8")
    with pytest.raises(AssertionError, match="--nothing"):
        run_page(page, {})


def test_an_example_that_is_not_run_says_why() -> None:
    text = "<!-- not run: takes long -->\n```python\nwait()\n```\n"
    assert [block.excuse for block in blocks(text)] == ["not run: takes long"]
    for path in PAGES:
        excuses = [block.excuse for block in blocks(path.read_text("utf-8")) if block.excuse]
        assert all(re.fullmatch(r"not run( yet)?: \S.{5,}", excuse) for excuse in excuses), excuses


def test_the_readme_is_short_and_its_pictures_are_there() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("\n") <= 120
    pictures = re.findall(r'<img src="([^"]+)"', text)
    assert len(pictures) > 5
    assert [path for path in pictures if not (ROOT / path).exists()] == []


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text("utf-8"), flags=re.S)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            assert "://" in target or (path.parent / target).exists(), f"{path.name} links to {target}"


@contextlib.contextmanager
def docs_script(name: str) -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_up_to_date(name: str) -> None:
    with docs_script(f"write_{name}") as script:
        assert (ROOT / "docs" / f"{name}.md").read_text("utf-8") == script.page(), "run make docs"


def test_docstrings_do_not_turn_into_markup() -> None:
    with docs_script("as_markdown") as script:
        assert script.prose("A *b* of _c_ and mean_cca < 1, `a < b` in [0]:\n    x * y\nEnd.") == (
            "A \\*b\\* of \\_c\\_ and mean_cca &lt; 1, `a < b` in \\[0]:\n\n    x * y\n\nEnd.\n"
        )


class Loads(HTMLParser):
    """What a browser fetches by itself when it shows a page; links are followed by people only."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value and (key in ("src", "srcset", "poster") or (tag == "link" and key == "href")):
                self.found.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, made from a copy so that the checkout stays as it is."""
    pytest.importorskip("zensical", reason="building the site needs the extra docs: pip install '.[docs]'")
    copy = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", copy / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("zensical.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    found = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=copy,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return copy / "site"


def test_the_site_builds_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.stem for path in PAGES} - {"README"}
    assert pages <= {path.stem for path in site.glob("*.html")}
    for path in site.rglob("*.html"):
        loads = Loads()
        loads.feed(path.read_text("utf-8"))
        assert loads.found
        assert not [each for each in loads.found if "//" in each], path.name
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", path.read_text("utf-8")), path.name


def test_every_link_of_the_site_leads_to_a_page_and_a_heading(site: Path) -> None:
    pages = {path.name: path.read_text("utf-8") for path in site.glob("*.html") if path.stem != "404"}
    lost = []
    for name, text in pages.items():
        for link in set(re.findall(r'<a [^>]*?href="([^"]*)"', text)):
            page, _, heading = unquote(unescape(link)).partition("#")
            there = "://" in page or (site / page).exists()
            if not there or (heading and "://" not in page and f'id="{heading}"' not in pages[page or name]):
                lost.append(f"{name}: {link}")
    assert lost == []


@pytest.mark.browser
def test_the_site_and_its_search_work_from_the_file_system(site: Path, chromium: Any) -> None:
    asked: list[str] = []
    page = chromium.new_page(viewport={"width": 390, "height": 900})
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "measures.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "a wide table must scroll by itself"
    page.keyboard.press("Control+k")
    page.keyboard.type("jackknife", delay=40)
    page.locator("mark", has_text="jackknife").first.wait_for()
    page.close()
    assert not [url for url in asked if url.startswith("http")]
