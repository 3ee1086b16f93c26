"""Sites: the places of a model where activations are taken, and how to ask for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .blocks import default_sites, repeated_blocks
from .names import Names, unwrap

OUTPUT = "output"


class SiteError(ValueError):
    """Something is wrong with a site that was asked for."""


class UnknownSite(SiteError):
    """No module of the model answers to this name, glob or type."""


class SilentSite(SiteError):
    """A site that was asked for did not fire."""


class NoRows(SiteError):
    """What a site returned cannot become rows: an error where it was named, else the site is left out."""

    def __init__(self, label: str, reason: str, instead: str) -> None:
        super().__init__(f"site {label!r} {reason}. {instead}")
        self.reason = reason


@dataclass(frozen=True)
class Site:
    """One call of one module: where activations are taken, under a label that is unique in the model."""

    label: str  # "layer1.0"; the second call of a module in one forward is "mix@2"
    module_name: str  # "" is the model itself
    call: int  # counted from 1
    shape: tuple[int, ...]  # of one input's activation, as in the first forward
    channels_last: bool | None  # whether the last dimension holds the features, or else the first; None: not known


@dataclass
class Wanted:
    """What was asked of one module: which of its calls, and which of them must happen."""

    module: nn.Module
    calls: set[int] | None = field(default_factory=set)  # None: every call
    required: set[int] = field(default_factory=set)  # named exactly, so their absence is an error

    def add(self, call: int | None, *, exact: bool) -> None:
        if call is None:
            self.calls = None
        elif self.calls is not None:
            self.calls.add(call)
        if exact:
            self.required.add(call or 1)


def select(model: nn.Module, sites: Any = None) -> dict[str, Wanted]:
    """The modules asked for, by their first name, in registration order.

    `sites` is None (repeated blocks, or the layers of a plain net), one selector, or a list of them: a
    module's name (every call of it), "name@k" (its k-th call), a glob (`*` crosses dots; an exact name wins),
    a module type, a module of the model, "leaves", "blocks", or "." for the model's own output.
    """
    return selected(Names.of(unwrap(model)), sites)


def selected(names: Names, sites: Any = None) -> dict[str, Wanted]:
    """The same, of a model whose names are known."""
    found: dict[str, Wanted] = {}
    for name, call, exact in _asked_for(names, sites):
        found.setdefault(name, Wanted(names.by_name[name])).add(call, exact=exact)
    return {name: found[name] for name in names.by_name if name in found}


def _asked_for(names: Names, sites: Any) -> Iterable[tuple[str, int | None, bool]]:
    if sites is None:
        yield from ((name, None, False) for name in default_sites(names))
        return
    single = isinstance(sites, (str, type, nn.Module))
    selectors = [sites] if single else list(sites)
    if not selectors:
        raise UnknownSite("an empty list of sites; leave sites out for the default")
    for selector in selectors:
        yield from _resolve(names, selector)


def _resolve(names: Names, selector: Any) -> list[tuple[str, int | None, bool]]:
    if isinstance(selector, str):
        return _by_text(names, selector)
    if isinstance(selector, nn.Module):
        name = names.first.get(id(selector), names.first.get(id(unwrap(selector))))
        if name is None:
            raise UnknownSite(f"this {type(selector).__name__} is not a part of the model")
        return [(name, None, True)]
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        found = [name for name, module in names.unique().items() if isinstance(module, selector)]
        if not found:
            kinds = sorted({type(module).__name__ for module in names.by_name.values()})
            raise UnknownSite(f"no module of type {selector.__name__}; there are {', '.join(kinds)}")
        return [(name, None, False) for name in found]
    raise UnknownSite(f"a site is a name, a glob, a module type or a module; got {selector!r}")


def _by_text(names: Names, text: str) -> list[tuple[str, int | None, bool]]:
    exact = find_name(names, text)
    if exact is not None:
        return [(*exact, True)]
    if text == "leaves":
        return [(name, None, False) for name in names.leaves()]
    if text == "blocks":
        found = repeated_blocks(names)
        if not found:
            raise UnknownSite('no blocks: no class of modules with children occurs twice; try "leaves"')
        return [(name, None, False) for name in found]
    pattern, call = split_call(text)
    globbed = [name for name in names.by_name if name and fnmatchcase(name, pattern)]
    matched = {names.first[id(names.by_name[name])] for name in globbed}
    if not matched or not set("*?[") & set(pattern):
        raise UnknownSite(f"no module is called {pattern!r}{nearest(pattern, names.by_name)}")
    return [(name, call, False) for name in names.by_name if name in matched]


def find_name(names: Names, text: str) -> tuple[str, int | None] | None:
    """First name and call that a text names exactly (by an alias too), or None."""
    for candidate, call in ((text, None), split_call(text)):
        name = "" if candidate in ("", ".") else candidate
        if name == OUTPUT and OUTPUT not in names.by_name:
            name = ""
        if name in names.by_name:
            return names.first[id(names.by_name[name])], call
    return None


def split_call(text: str) -> tuple[str, int | None]:
    """Name and call: "mix@2" gives ("mix", 2); without a number the call is None."""
    name, _, call = text.rpartition("@")
    if call.isdecimal() and "@" in text:
        if int(call) == 0:
            raise UnknownSite(f"calls are counted from 1, got {text!r}")
        return name, int(call)
    return text, None


def label_of(names: Names, name: str, call: int) -> str:
    """How a site is shown; the model's own output is "output" unless a module took that name."""
    base = name or ("." if OUTPUT in names.by_name else OUTPUT)
    return base if call == 1 else f"{base}@{call}"


def nearest(text: str, known: Iterable[str]) -> str:
    """The end of an error message that offers the names closest to a mistyped one."""
    known = [name for name in known if name]
    inside = [name for name in known if name.endswith(f".{text}")][:3]
    near = inside or difflib.get_close_matches(text, known, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    few = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
    return f"; there are {few}" if known else "; the model has no parts: '.' is its own output"
