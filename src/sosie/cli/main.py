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

VERBS = (
    *("demo", "compare", "outputs", "sites", "measures", "report", "stitch", "sketch", "transfer", "weights"),
    *("dynamics", "cost", "benchmark", "serve"),
)  # in the order of the help; a module each
app = typer.Typer(
    name="sosie",
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


for _name in VERBS:
    app.command()(_interruptible(getattr(import_module(f"{__package__}.{_name}"), _name)))
_zoo = typer.Typer(help=zoo.HELP, no_args_is_help=True)
for _name, _verb in (zoo.VERBS | zoo.QUESTIONS).items():
    _zoo.command(_name)(_interruptible(_verb))
app.add_typer(_zoo, name="zoo")
# Other arguments go to the paper's own script.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_interruptible(papers.papers))


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
        typer.secho(f"error: {_message(error)}", fg="red", err=True)
        sys.exit(1)


def _message(error: Exception) -> str:
    """Return the message, with its type if the message alone is not clear."""
    plain = isinstance(error, (ValueError, TypeError, OSError, ImportError, MemoryError)) or not error.args
    # str() of a KeyError is the repr of its message.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    hint = "" if plain else "\n  (SOSIE_DEBUG=1 shows the traceback)"
    name = "" if plain and text else f"{type(error).__name__}: "
    return f"{name}{text}{notes}{hint}"
