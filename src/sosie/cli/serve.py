"""`sosie serve`: a zoo in the browser."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as opt


def serve(
    folder: opt.Folder,
    host: Annotated[
        str, opt.option(opt.RUN, "ADDRESS", "Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, opt.option(opt.RUN, "N", "0 finds a free one.", min=0, max=65535)] = 8017,
    allow: Annotated[
        list[str] | None, opt.option(opt.RUN, "NAME", "A host name that browsers may use; may be repeated.")
    ] = None,
    open_: Annotated[bool, opt.flag(opt.OUTPUT, "--open", "Open it in the browser.")] = False,
) -> None:
    """Look through a zoo in the browser.

    $ sosie serve nets --open
    $ sosie serve nets --port 0

    Map, searches, comparisons. It only reads; Ctrl-C ends it.
    """
    from ..results import counted
    from ..zoo import Zoo

    zoo = Zoo(folder)
    try:
        from ..web import serve as answer
        from ..web.serving import address_of, bound, is_loopback
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise ImportError("sosie serve needs FastAPI and uvicorn: pip install 'sosie[web]'") from error
    listening = bound(host, port)
    address = address_of(listening)
    if not is_loopback(host):
        typer.echo("everybody who can reach this machine can read the zoo: there are no passwords", err=True)

    def ready() -> None:
        typer.echo(f"{folder}: {counted(len(zoo), 'model')} at {address} (Ctrl-C ends it)")
        if open_:
            typer.launch(address)

    try:
        answer(zoo, listening, allow or (), ready)
    except KeyboardInterrupt:
        typer.echo("ended")
