"""A diff on the terminal and as a page: the verdict, the error along the layers, outputs, weights."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console

from ..checks import listed
from ..files import plain_json, write_atomically
from ..results import QUANTILES, Diff, OutputDiff, SiteDiff, TensorDiff, cell, counted
from ..results.diff import short
from .colour import RAMP
from .page import render_page
from .terminal import MOST_ROWS, print_bullets, print_columns, print_text, shown_rows, with_gaps
from .words import flat, size, visible

MOST_TENSORS = 2000  # on a page; the file has all


def print_diff(diff: Diff, console: Console | None = None, *, full: bool = False) -> None:
    """Print the verdict, a line for each site, what the models answer, and the tensors that changed most."""
    console = console or Console()
    print_text(console, visible(diff.verdict), "bold")
    if diff.sites:
        heads = ["site", "error", "makes itself", "floor", "SQNR, dB", ""]
        _print_rows(console, heads, list(map(_site_cells, diff.sites)), _shown_sites(diff, full))
        if diff.floor:
            print_text(console, floor_sentence(diff), "dim")
    if diff.outputs:
        rows = [[visible(o.measure), cell(o.value), interval(o), place(o)] for o in diff.outputs]
        _print_rows(console, ["what they answer", "value", "95 % interval", "where"], rows, shown_rows(len(rows), full))
    if diff.weights:
        rows = list(map(_tensor_cells, diff.weights))
        _print_rows(console, ["tensor", "shape", "change", "largest", ""], rows, shown_rows(len(rows), full))
    print_bullets(console, [visible(text) for text in (*unpaired(diff), *diff.caveats)], "yellow")


def _print_rows(console: Console, heads: list[str], rows: list[list[str]], shown: list[int]) -> None:
    lines = with_gaps(console, {k: rows[k] for k in shown}, len(rows))
    print_columns(console, heads, lines, left=(0, len(heads) - 1), names=(0,))


def _shown_sites(diff: Diff, full: bool) -> list[int]:
    """The sites that are printed: those that make an error and what is inside them, then those nearest to them."""
    count = len(diff.sites)
    if full or count <= MOST_ROWS + 1:
        return list(range(count))
    guilty = [k for k, s in enumerate(diff.sites) if s.inside or makes_error(s, diff.factor)] or [
        k for k, s in enumerate(diff.sites) if s.beyond
    ]
    ends = guilty or [0, count - 1]
    near = sorted(range(count), key=lambda k: (min(abs(k - end) for end in ends), k))
    return sorted(near[:MOST_ROWS])


def makes_error(site: SiteDiff, factor: float | None) -> bool:
    """Whether a site makes an error beyond its floor itself."""
    if site.made is None or site.made_floor is None:
        return False
    return not site.made <= (factor or 1.0) * site.made_floor


def _site_cells(site: SiteDiff) -> list[str]:
    name = visible(site.site_a if site.site_a == site.site_b else f"{site.site_a} = {site.site_b}")
    notes = "; ".join([*(["beyond"] if site.beyond else []), *map(visible, site.notes)])
    sqnr = "" if site.sqnr is None else str(round(site.sqnr))
    return [("  " if site.inside else "") + name, *map(short, (site.error, site.made, site.floor)), sqnr, notes]


def _tensor_cells(tensor: TensorDiff) -> list[str]:
    said = [*tensor.notes]
    if tensor.low_rank is not None and not any(note.startswith(f"rank {tensor.low_rank} ") for note in said):
        said.insert(0, f"rank {tensor.low_rank}")
    change = "equal" if tensor.equal else cell(tensor.change)
    return [visible(name_of(tensor)), size(tensor.shape), change, cell(tensor.largest), "; ".join(map(visible, said))]


def name_of(tensor: TensorDiff) -> str:
    """A tensor's name in both models, or in the one that has it."""
    if tensor.name_b is None:
        return f"{tensor.name_a} (only in A)"
    if tensor.name_a is None:
        return f"{tensor.name_b} (only in B)"
    return tensor.name_a if tensor.name_a == tensor.name_b else f"{tensor.name_a} = {tensor.name_b}"


def interval(output: OutputDiff) -> str:
    return "" if output.low is None or output.high is None else f"{cell(output.low)} to {cell(output.high)}"


def place(of: OutputDiff | SiteDiff) -> str:
    return "" if of.at is None else str(of.at)


def floor_sentence(diff: Diff) -> str:
    """What an error is held against."""
    beyond = "" if diff.factor is None else f" Beyond: more than {diff.factor:g} times that."
    return f"Floor: {visible(diff.floor).rstrip('.')}.{beyond}"


def unpaired(diff: Diff) -> list[str]:
    """A sentence for each model that has sites without a counterpart."""
    return [
        f"{counted(len(sites), 'site')} of {name} without a counterpart: {listed(sites, 6)}"
        for name, sites in ((diff.name_a, diff.unpaired_a), (diff.name_b, diff.unpaired_b))
        if sites
    ]


def write_junit(diff: Diff, path: str | os.PathLike[str]) -> Path:
    """Write JUnit XML: a test for the verdict and one for each site or tensor, failed where they differ."""
    tests = [("verdict", None if diff.same else diff.verdict)]
    tests += [(s.site_a, _failure(s) if s.beyond and not diff.same else None) for s in diff.sites]
    if not diff.sites:
        tests += [
            (name_of(t), None if t.equal else f"changed by {cell(t.change) or 'an unknown amount'}")
            for t in diff.weights
        ]
    return _write_suite(f"{diff.name_a} and {diff.name_b}", tests, "failure", path)


def write_junit_error(name: str, message: str, path: str | os.PathLike[str]) -> Path:
    """Write JUnit XML for models that could not be compared: one test, which ended in an error."""
    return _write_suite(name, [("verdict", message)], "error", path)


def _write_suite(name: str, tests: list[tuple[str, str | None]], kind: str, path: str | os.PathLike[str]) -> Path:
    """Write tests with the messages of those that did not pass; `kind`: failure or error."""
    counts = {"failures": 0, "errors": 0, f"{kind}s": sum(message is not None for _, message in tests)}
    about = {"tests": len(tests), **counts}
    suite = ElementTree.Element("testsuite", {"name": _xml(name), **{key: str(n) for key, n in about.items()}})
    for test, message in tests:
        case = ElementTree.SubElement(suite, "testcase", classname="sosie.diff", name=_xml(test))
        if message is not None:
            ElementTree.SubElement(case, kind, message=_xml(message))
    ElementTree.indent(suite)
    return write_atomically(path, ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n")


def _failure(site: SiteDiff) -> str:
    made = "" if site.made is None else f", of which it makes {short(site.made)} itself"
    return f"error {short(site.error)}{made}; the floor is {short(site.floor)}"


def _xml(text: str) -> str:
    """Text without the characters that XML cannot hold."""
    return "".join(c for c in visible(text) if c not in "\ufffe\uffff")


def render(diff: Diff) -> str:
    """The page of a diff."""
    return render_page(
        title=visible(f"{diff.name_a} and {diff.name_b}"),
        question="Is it still the same model?",
        lead=visible(diff.verdict),
        others=[],
        kind="verdict",
        data=_contents(diff),
        scripts=("scale", "table", "diff_figure", "diff_page"),
        styles=("figures", "diff", "page"),
    )


def _contents(diff: Diff) -> dict[str, Any]:
    content: dict[str, Any] = plain_json(
        {
            "ramp": RAMP,
            "same": diff.same,
            "names": [visible(diff.name_a), visible(diff.name_b)],
            "first": None if diff.first is None else visible(diff.first),
            "factor": diff.factor,
            "floor": floor_sentence(diff) if diff.floor else "",
            "quantiles": list(QUANTILES),
            "sites": [_site(site) for site in diff.sites],
            "outputs": [
                {
                    **asdict(output),
                    "measure": visible(output.measure),
                    "meaning": visible(output.meaning) if output.meaning else "",
                    "at": place(output),
                }
                for output in diff.outputs
            ],
            "weights": [
                {
                    **asdict(t),
                    "name": visible(name_of(t)),
                    "shape": size(t.shape),
                    "notes": [visible(n) for n in t.notes],
                }
                for t in diff.weights[:MOST_TENSORS]
            ],
            "tensors": len(diff.weights),
            "caveats": [visible(text) for text in (*unpaired(diff), *diff.caveats)],
            "provenance": [list(line) for line in flat(diff.provenance)],
        }
    )
    return content


def _site(site: SiteDiff) -> dict[str, Any]:
    texts = {name: visible(getattr(site, name)) for name in ("site_a", "site_b", "paired", "dtype_a", "dtype_b")}
    notes = [visible(note) for note in site.notes]
    inside = visible(site.inside) if site.inside else ""
    return {**asdict(site), **texts, "inside": inside, "shape": size(site.shape), "at": place(site), "notes": notes}
