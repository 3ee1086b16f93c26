"""The explorer's routes: JSON under /api, and the front end's own files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from .. import __version__
from ..report.colour import ramp
from ..results import DamagedFile
from ..zoo import NotComparable, Zoo, ZooBusy
from ..zoo.questions.duplicates import SAME
from ..zoo.store import listing
from ..zoo.store.errors import UnknownModel, ZooGone
from . import asking, groups, runs, uploads
from .files import FrontEnd
from .guard import Guard
from .kept import Kept, as_json
from .maps import Maps

MOST_ROWS = 200  # of a page of models
MOST_NEAR = 100
MOST_CLUSTERS = 100

Kind = Literal["cka", "weights", "atoms"]
Number = Annotated[int, Path(ge=1, le=2**62)]
Text = Annotated[str | None, Query(max_length=200)]
Texts = Annotated[list[str] | None, Query(max_length=20)]
K = Annotated[int, Query(ge=1, le=MOST_NEAR)]
Clusters = Annotated[int | None, Query(ge=1, le=MOST_CLUSTERS)]
Limit = Annotated[int, Query(ge=1, le=MOST_ROWS)]
Offset = Annotated[int, Query(ge=0, le=2**62)]


def create_app(zoo: Zoo, hosts: Iterable[str] = ()) -> ASGIApp:
    """An ASGI application that shows a zoo and changes nothing; `hosts` are names it answers to beside loopback's."""
    # By its whole path, which errors name and readers are not told: a short one, "zoo" say, is a word of the messages.
    zoo = Zoo(zoo.folder.absolute(), wait=zoo.store.wait)
    app = FastAPI(title="sosie", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")
    kept = Kept(zoo.store.database.changes)
    _tell_errors(app, zoo)
    _models(app, zoo, kept)
    _similarity(app, zoo, kept)
    _groups(app, zoo, kept)
    _maps(app, zoo, kept)
    _runs(app, zoo, kept)
    return Guard(FrontEnd(app), hosts)  # outside of everything, so that answers about errors pass it too


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
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> Response:
        filters = _filters(tag, architecture, task)
        make = partial(listing.page, zoo.store.database, limit, offset, text=text, **filters)
        return _json(await kept.ask(("models", text, limit, offset, *_key(filters)), make))

    @app.get("/api/models/{number}")
    async def model(number: Number) -> Response:
        return _json(await kept.ask(("model", number), lambda: asking.model(zoo, number), quick=True))


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
        "choices": listing.choices(zoo.store.database),
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

    @app.get("/api/models/{number}/family")
    async def family(number: Number, k: K = 5) -> Response:
        return _json(await kept.ask(("family", number, k), lambda: asking.family(zoo, number, k)))

    @app.get("/api/pairs/{first}/{second}")
    async def pair(first: Number, second: Number, kind: Kind = "cka", exact: bool = False) -> Response:
        make = partial(asking.pair, zoo, first, second, kind=kind, exact=exact)
        return _json(await kept.ask(("pair", first, second, kind, exact), make))


def _groups(app: FastAPI, zoo: Zoo, kept: Kept) -> None:
    async def clustered(kind: str, k: int | None, filters: dict[str, Any]) -> bytes:
        make = partial(groups.clusters, zoo, kind, k, filters)
        return await kept.ask(("clusters", kind, k, *_key(filters)), make, patient=True)

    @app.get("/api/clusters")
    async def clusters(
        k: Clusters = None, kind: Kind = "cka", tag: Texts = None, architecture: Texts = None, task: Texts = None
    ) -> Response:
        return _json(await clustered(kind, k, _filters(tag, architecture, task)))

    @app.get("/api/clusters/{number}")
    async def members(
        number: Annotated[int, Path(ge=0, le=2**62)],
        k: Clusters = None,
        kind: Kind = "cka",
        tag: Texts = None,
        architecture: Texts = None,
        task: Texts = None,
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> Response:
        whole = await clustered(kind, k, _filters(tag, architecture, task))
        return _json(await kept.work_out(lambda: groups.members(zoo, whole, number, limit, offset)))

    @app.get("/api/duplicates")
    async def duplicates(
        kind: Kind = "cka",
        threshold: Annotated[float, Query(ge=0.5, le=1)] = SAME,
        why: Literal["weights", "alike"] | None = None,
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> Response:
        make = partial(groups.duplicates, zoo, kind, threshold)
        whole = await kept.ask(("duplicates", kind, threshold), make, patient=True)
        return _json(await kept.work_out(lambda: groups.page_of_duplicates(whole, why, limit, offset)))


def _maps(app: FastAPI, zoo: Zoo, kept: Kept) -> None:
    maps = Maps(zoo)
    most = uploads.most_bytes(zoo)
    room = asyncio.Semaphore(uploads.AT_ONCE)

    async def map_of(kind: str) -> bytes:
        return await kept.ask(("map", kind), lambda: maps.answer(kind), patient=True)

    @app.get("/api/map")
    async def map_(kind: Kind = "cka") -> Response:
        return _json(await map_of(kind))

    @app.post("/api/near")
    async def near(request: Request, k: K = 10, kind: Kind = "cka", place: bool = False) -> Response:
        uploads.check_length(request.headers.get("content-length"), most)
        path = await uploads.received(request.stream(), most)  # with no place taken: it may arrive slowly
        try:
            async with room:
                found = await run_in_threadpool(uploads.checked, zoo, path)
                answer = await run_in_threadpool(asking.near, zoo, found, k=k, kind=kind, by="model")
                if place:
                    await map_of(kind)
                    answer["place"] = await run_in_threadpool(maps.place, kind, found)
                return _json(as_json({**answer, "sent": uploads.described(found)}))
        finally:
            os.unlink(path)


def _runs(app: FastAPI, zoo: Zoo, kept: Kept) -> None:
    @app.get("/api/runs")
    def all_runs() -> Response:
        return _json(as_json({"rows": runs.listed(zoo.folder)}))

    @app.get("/api/run")
    async def run(name: Annotated[str, Query(max_length=255)]) -> Response:
        question = ("run", name, *runs.stamp(zoo.folder, name))
        return _json(await kept.ask(question, lambda: runs.opened(zoo.folder, name)))


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
        ZooGone: 503,
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
        text = "there is no such page" if error.status_code == 404 else str(error.detail)
        return JSONResponse({"error": text}, error.status_code)

    @app.exception_handler(Exception)
    async def tell_any(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "something went wrong here; the server's log has more"}, 500)
