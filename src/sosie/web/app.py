"""The explorer's routes: JSON under /api, and the front end's own files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from .. import __version__
from ..report.colour import ramp
from ..results import DamagedFile
from ..zoo import NotComparable, Zoo, ZooBusy
from ..zoo.store.errors import UnknownModel
from . import asking, listing, runs, uploads
from .files import static_files
from .guard import Guard
from .kept import Kept, as_json

MOST_ROWS = 200  # of a page of models
MOST_NEAR = 100
MOST_POINTS = 20_000  # of the map

Kind = Literal["cka", "weights", "atoms"]
Number = Annotated[int, Path(ge=1, le=2**62)]
Text = Annotated[str | None, Query(max_length=200)]
Texts = Annotated[list[str] | None, Query(max_length=20)]
K = Annotated[int, Query(ge=1, le=MOST_NEAR)]


def create_app(zoo: Zoo, hosts: Iterable[str] = ()) -> ASGIApp:
    """An ASGI application that shows a zoo and changes nothing; `hosts` are names it answers to beside loopback's."""
    app = FastAPI(title="sosie", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")
    kept = Kept(zoo.store.database.changes)
    _tell_errors(app, zoo)
    _models(app, zoo, kept)
    _similarity(app, zoo, kept)
    _uploads(app, zoo)
    _runs(app, zoo, kept)
    _front_end(app)
    return Guard(app, hosts)  # outside of everything, so that answers about errors pass it too


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _filters(tag: Texts = None, architecture: Texts = None, task: Texts = None) -> dict[str, Any]:
    return {"tag": tag or None, "architecture": architecture or None, "task": task or None}


def _key(filters: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(tuple(value) if value else None for value in filters.values())


def _models(app: FastAPI, zoo: Zoo, kept: Kept) -> None:
    @app.get("/api/zoo")
    async def about() -> Response:
        return _json(await kept.ask(("zoo",), lambda: _about(zoo)))

    @app.get("/api/models")
    async def models(
        text: Text = None,
        tag: Texts = None,
        architecture: Texts = None,
        task: Texts = None,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 50,
        offset: Annotated[int, Query(ge=0, le=2**62)] = 0,
    ) -> Response:
        filters = _filters(tag, architecture, task)
        make = partial(listing.page, zoo, limit, offset, text=text, **filters)
        return _json(await kept.ask(("models", text, limit, offset, *_key(filters)), make))

    @app.get("/api/models/{number}")
    async def model(number: Number) -> Response:
        return _json(await kept.ask(("model", number), lambda: asking.model(zoo, number)))


def _about(zoo: Zoo) -> dict[str, Any]:
    about = zoo.settings
    return {
        "name": zoo.folder.absolute().name,
        "models": len(zoo),
        "failed": len(zoo.failed()),
        "probe": about.probe,
        "n": about.n,
        "size": about.size,
        "kinds": asking.kinds_of(zoo),
        "what": asking.WHAT,
        "version": __version__,
        "ramp": list(ramp()),
        "most_bytes": uploads.most_bytes(zoo),
        "choices": listing.choices(zoo),
    }


def _similarity(app: FastAPI, zoo: Zoo, kept: Kept) -> None:
    @app.get("/api/models/{number}/near")
    async def near(
        number: Number,
        k: K = 10,
        kind: Kind = "cka",
        by: Literal["model", "layer"] = "model",
        site: Annotated[str | None, Query(max_length=1000)] = None,
        tag: Texts = None,
        architecture: Texts = None,
        task: Texts = None,
    ) -> Response:
        filters = _filters(tag, architecture, task)
        make = partial(asking.near, zoo, number, k=k, kind=kind, by=by, site=site, **filters)
        return _json(await kept.ask(("near", number, k, kind, by, site, *_key(filters)), make))

    @app.get("/api/pairs/{first}/{second}")
    async def pair(first: Number, second: Number, kind: Kind = "cka", exact: bool = False) -> Response:
        make = partial(asking.pair, zoo, first, second, kind=kind, exact=exact)
        return _json(await kept.ask(("pair", first, second, kind, exact), make))

    @app.get("/api/map")
    async def map_(kind: Kind = "cka") -> Response:
        return _json(await kept.ask(("map", kind), lambda: asking.map_of(zoo, kind, MOST_POINTS), patient=True))


def _uploads(app: FastAPI, zoo: Zoo) -> None:
    most = uploads.most_bytes(zoo)
    room = asyncio.Semaphore(uploads.AT_ONCE)

    @app.post("/api/near")
    async def near(request: Request, k: K = 10, kind: Kind = "cka") -> Response:
        uploads.check_length(request.headers.get("content-length"), most)
        async with room:
            path = await uploads.received(request.stream(), most)
            try:
                return _json(await run_in_threadpool(answered, path, k, kind))
            finally:
                os.unlink(path)

    def answered(path: Any, k: int, kind: str) -> bytes:
        found = uploads.checked(zoo, path)
        names = ("architecture", "parameters", "model")
        sent = {name: str(found.about.get(name, "unknown"))[:200] for name in names}
        return as_json({**asking.near(zoo, found, k=k, kind=kind, by="model"), "sent": {**sent, "sites": found.sites}})


def _runs(app: FastAPI, zoo: Zoo, kept: Kept) -> None:
    @app.get("/api/runs")
    def all_runs() -> Response:
        return _json(as_json({"rows": runs.listed(zoo.folder)}))

    @app.get("/api/run")
    async def run(name: Annotated[str, Query(max_length=255)]) -> Response:
        question = ("run", name, *runs.stamp(zoo.folder, name))
        return _json(await kept.ask(question, lambda: runs.opened(zoo.folder, name)))


def _front_end(app: FastAPI) -> None:
    files = static_files()  # read once: what is served was there when the server started, and nothing else is

    @app.api_route("/{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        found = files.get(name or "index.html")
        if found is None:
            raise HTTPException(404, "there is no such page")
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=found.headers)
        return Response(found.content, media_type=found.kind, headers=found.headers)


def _tell_errors(app: FastAPI, zoo: Zoo) -> None:
    """Every error is JSON with a sentence in it, and never more than that."""
    told: dict[type[Exception], int] = {
        UnknownModel: 404,
        runs.UnknownRun: 404,
        NotComparable: 422,
        uploads.TooLarge: 413,
        DamagedFile: 422,
        ValueError: 422,
        ZooBusy: 503,
        TimeoutError: 408,
    }

    def answer(status: int, error: Exception) -> Response:
        text = str(error).replace(str(zoo.folder), "the zoo") or "it took too long to arrive"
        # Bytes that were not read are left behind; the next request must not begin with them.
        headers = {"Connection": "close"} if status in (408, 413) else None
        return Response(as_json({"error": text}), status, headers, "application/json")

    for kind, status in told.items():

        @app.exception_handler(kind)
        async def tell(_: Request, error: Exception, status: int = status) -> Response:
            return answer(status, error)

    @app.exception_handler(RequestValidationError)
    async def tell_wrong(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def tell_plain(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(Exception)
    async def tell_any(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "something went wrong here; the server's log has more"}, 500)
