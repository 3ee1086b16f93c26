"""What `--help` prints: what a verb answers, two examples, and its options in groups, 80 columns wide.

The docstring of a verb is its help: a sentence, a line "$ sosie …" for each example, and more text if it needs any.
The groups are `rich_help_panel` of options and verbs. typer's own boxes would show types instead of meanings, keep
arguments and options of one group apart, and look different in every version of typer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from textwrap import TextWrapper
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .options import GROUPS

WIDTH, NO_BREAK = 80, "\xa0"


class Verb(TyperCommand):
    """A verb that prints its help in this way."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; like typer's own, it leaves nothing in the formatter."""
        parameters: list[Any] = [
            each for each in self.get_params(ctx) if each.name != "help" and not getattr(each, "hidden", False)
        ]
        needed = [term(each) for each in parameters if each.required or each.param_type_name == "argument"]
        parameters.sort(key=lambda each: [*GROUPS, each.rich_help_panel].index(each.rich_help_panel))
        _print(ctx, self, needed, ((each.rich_help_panel, term(each), _meaning(each)) for each in parameters))


class Verbs(TyperGroup):
    """A group of verbs that prints its help in this way."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; like typer's own, it leaves nothing in the formatter."""
        verbs: list[Any] = [self.commands[name] for name in self.list_commands(ctx)]
        _print(ctx, self, ["VERB"], ((verb.rich_help_panel, verb.name, split_help(verb.help)[0]) for verb in verbs))


def split_help(text: str | None) -> tuple[str, list[str], list[str]]:
    """Return the sentence that a help starts with, its examples, and its other paragraphs."""
    first, *others = inspect.cleandoc(text or "").split("\n\n")
    examples = [line.removeprefix("$ ") for part in others for line in part.split("\n") if part.startswith("$ ")]
    return " ".join(first.split()), examples, [" ".join(part.split()) for part in others if not part.startswith("$ ")]


def default_of(parameter: Any) -> str:
    """Return the default: `show_default` if the value is chosen later, "" if there is none."""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    unset = parameter.required or parameter.default is None or parameter.default is False
    return "" if unset else str(parameter.default)


def term(parameter: Any) -> str:
    """Return an argument or option as it is typed: MODEL …, --out FILE, --full."""
    if parameter.param_type_name == "option":
        return ", ".join(parameter.opts) + ("" if parameter.is_flag else f" {parameter.metavar}")
    text = parameter.metavar + " …" * (parameter.nargs != 1)
    return text if parameter.required else f"[{text}]"


def _meaning(parameter: Any) -> str:
    """Return the help with the default before its full stop; a short default is kept on one line."""
    if not (default := default_of(parameter)):
        return str(parameter.help)
    added = f"(default: {default})"
    text = parameter.help.removesuffix(".")
    return f"{text} {added if len(added) > 30 else added.replace(' ', NO_BREAK)}{parameter.help[len(text) :]}"


def _print(ctx: Any, verb: Any, needed: list[str], rows: Iterable[tuple[str | None, str, str]]) -> None:
    """Print usage, sentence, examples and text, then the groups in the order in which they first appear."""
    sentence, examples, texts = split_help(verb.help)
    usage = _wrapped(" ".join(["Usage:", ctx.command_path, *needed, "[OPTIONS]"]), then="    ")
    blocks = [usage, _wrapped(sentence)]
    if examples:
        blocks.append("\n".join([_heading("Examples"), *map(_example, examples)]))
    blocks += map(_wrapped, texts)
    groups: dict[str, list[tuple[str, str]]] = {}
    for group, term, meaning in rows:
        groups.setdefault(group or "Options", []).append((term, meaning))
    column = max(len(term) for entries in groups.values() for term, _ in entries) + 4
    for group, entries in groups.items():
        lines = (_wrapped(meaning, f"  {term}".ljust(column), " " * column) for term, meaning in entries)
        blocks.append("\n".join([_heading(group), *lines]))
    if verb.epilog:
        blocks.append(_wrapped(verb.epilog))
    typer.echo("\n\n".join(blocks))


def _wrapped(text: str, first: str = "", then: str = "") -> str:
    wrapper = TextWrapper(
        WIDTH, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(text).replace(NO_BREAK, " ")


def _heading(text: str) -> str:
    return typer.style(f"{text}:", bold=True)


def _example(command: str) -> str:
    r"""Return a command over as many lines as it needs, each but the last ending in a "\"."""
    lines = [" "]
    word = r"""(?:"[^"]*"|'[^']*'|\S)+"""
    for part in re.findall(rf"--?[a-z][\w-]* (?!-[a-z-]){word}|{word}", command):  # an option stays with its value
        if len(lines[-1]) + len(part) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append("     ")
        lines[-1] += f" {part}"
    return "\n".join(lines)
