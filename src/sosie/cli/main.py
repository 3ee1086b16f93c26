"""`sosie VERB …`: the verbs, and the printing of errors."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from .. import __version__
from . import papers, zoo
from .help import Verb, Verbs
from .options import message_of

ZOO = "Make and search"
VERBS = {
    "Compare": ("compare", "diff", "outputs", "weights", "stitch", "dynamics", "transfer"),
    ZOO: ("demo", "extract", "record", "sketch"),
    "Look": ("sites", "measures", "report", "serve"),
    "Put to the test": ("benchmark", "cost"),
}  # by the question they answer, in the order of the help; a module each
app = typer.Typer(
    name="sosie",
    cls=Verbs,
    epilog="`sosie VERB --help` has examples and all options; `sosie --version`.",
    help="How alike are these neural networks: in what they represent, what they do, and what they are made of?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _interruptible(verb: Callable[..., None]) -> Callable[..., None]:
    """Print a message on an interruption; typer alone would end without one."""

    @functools.wraps(verb)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            verb(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("interrupted; no file is left half-written", err=True)
            raise typer.Exit(130) from None

    return wrapped


for _group, _names in VERBS.items():
    for _name in _names:
        _verb = getattr(import_module(f"{__package__}.{_name}"), _name)
        app.command(cls=Verb, rich_help_panel=_group)(_interruptible(_verb))
_zoo = typer.Typer(cls=Verbs, help=zoo.HELP, no_args_is_help=True)
for _group, _verbs in (("Make and keep", zoo.VERBS), ("Ask", zoo.QUESTIONS)):
    for _name, _verb in _verbs.items():
        _zoo.command(_name, cls=Verb, rich_help_panel=_group)(_interruptible(_verb))
app.add_typer(_zoo, name="zoo", rich_help_panel=ZOO)
# Other arguments go to the paper's own script.
app.command(
    cls=Verb,
    rich_help_panel="Put to the test",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(_interruptible(papers.papers))


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"sosie {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    """How alike are these neural networks: in what they represent, what they do, and what they are made of?"""


def run() -> None:
    """Run the command line; print an error as one sentence, or with SOSIE_DEBUG=1 as a traceback."""
    try:
        app()
    except BrokenPipeError:  # the reader of our output stopped early, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if os.environ.get("SOSIE_DEBUG"):
            raise
        typer.secho(f"error: {message_of(error)}", fg="red", err=True)
        sys.exit(getattr(error, "exit_status", 1))
