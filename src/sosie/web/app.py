"""The routes of the explorer: JSON under /api, and the files of the front end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..files import DamagedFile
from ..report.page import SHARED, style_file
from ..results import Map
from ..zoo import Fingerprint, Zoo, ZooBusy
from ..zoo.fingerprints import MOST_SITES
from ..zoo.questions import SAME
from ..zoo.store import Facts, UnknownModel, ZooGone, check_filters
from . import questions
from .cache import AnswerCache, as_json

# The files of the front end, which come with sosie

FOLDER = pathlib.Path(__file__).with_name("static")
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def front_end(app: ASGIApp) -> ASGIApp:
    """Serve the files, which are read once; every other path goes on to the application."""
    files: dict[str, tuple[bytes, str, str]] = {}  # content, type, ETag
    for path in (*sorted(FOLDER.iterdir()), style_file("colours"), style_file("base"), *SHARED):
        if path.suffix in CONTENT_TYPES:
            content = path.read_bytes()
            tag = hashlib.blake2b(content, digest_size=12).hexdigest()
            files[f"/{path.name}"] = content, CONTENT_TYPES[path.suffix], f'"{tag}"'
    files["/"] = files["/index.html"]

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        file = files.get(scope["path"]) if scope["type"] == "http" else None
        if file is None or scope["method"] not in ("GET", "HEAD"):
            await app(scope, receive, send)
            return
        content, kind, tag = file
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if Headers(scope=scope).get("if-none-match") == tag:
            await Response(status_code=304, headers=headers)(scope, receive, send)
        else:
            await Response(content, media_type=kind, headers=headers)(scope, receive, send)

    return serve


# The guard: who may ask, and what a browser may do with the answer
#
# A page from elsewhere can make a browser send requests to this machine, and even read the answers under a name of its
# own that it points here (DNS rebinding): so only requests under names of this machine are answered. Other pages may
# neither post nor frame the pages.

LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
RAW = {name.lower().encode(): value.encode() for name, value in HEADERS.items()}


def host_of(text: str) -> str | None:
    """Return the name in a Host header, without the port; None if it is malformed."""
    try:
        return urlsplit(f"//{text}").hostname if text and "@" not in text and "/" not in text else None
    except ValueError:
        return None


def guarded(app: ASGIApp, hosts: Iterable[str] = ()) -> ASGIApp:
    """Refuse unknown hosts and posts from other pages, and put the headers on every answer."""
    names = {*LOOPBACK, *(name.lower() for name in hosts)}

    def refusal(method: str, headers: Headers) -> JSONResponse | None:
        host = host_of(headers.get("host", ""))
        if len(headers.getlist("host")) != 1 or host not in names:
            text = "not a name of this server: `sosie serve --allow NAME` allows more names"
            return JSONResponse({"error": f"{str(host)[:100]!r} is {text}"}, 421)
        if method not in ("GET", "HEAD", "POST"):
            return JSONResponse({"error": "the explorer only reads"}, 405)
        origin = headers.get("origin")
        if method == "POST" and origin is not None and origin.lower().partition("://")[2] != headers["host"].lower():
            return JSONResponse({"error": "another page may not send files here"}, 403)
        return None

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] not in RAW]
                if all(name != b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                message["headers"] = [*headers, *RAW.items()]
            await send(message)

        await (refusal(scope["method"], Headers(scope=scope)) or app)(scope, receive, send_guarded)

    return serve


# A fingerprint that a browser sends: read up to a limit, checked like any file from others, never kept

HEAD = 2 * 2**20  # bytes for everything but vectors
SECONDS = 60.0  # for a file to arrive
AT_ONCE = 4  # files that are checked and looked up


def most_bytes(zoo: Zoo) -> int:
    """Return the largest size of a fingerprint of this zoo."""
    settings = zoo.settings
    return HEAD + 4 * MOST_SITES * (settings.n * (settings.n - 1) // 2 + 3 * settings.size)


async def received(request: Request, most: int) -> pathlib.Path:
    """Write the body to a temporary file, which the caller deletes."""
    too_large = f"a fingerprint of this zoo has at most {most:,} bytes"
    length = request.headers.get("content-length")
    if length is not None and (not length.isdecimal() or int(length[:20]) > most):  # before a byte is read
        raise HTTPException(413, f"{too_large}, this would be {length[:20]}")
    handle, name = tempfile.mkstemp(prefix="sosie-upload-", suffix=".safetensors")
    try:
        with os.fdopen(handle, "wb") as file:
            async with asyncio.timeout(SECONDS):
                async for part in request.stream():
                    file.write(part)
                    if file.tell() > most:
                        raise HTTPException(413, f"{too_large}: the rest was not read")
    except BaseException:
        os.unlink(name)
        raise
    return pathlib.Path(name)


def checked(zoo: Zoo, path: pathlib.Path) -> Fingerprint:
    """Return the fingerprint in a file if it was made like those of the zoo."""
    try:
        sent = Fingerprint.load(path)
    except DamagedFile as error:
        raise DamagedFile(str(error).replace(str(path), "the file")) from error
    zoo.settings.record("the file", sent, Facts())
    return sent


def described(sent: Fingerprint) -> dict[str, Any]:
    """Return what a fingerprint says about its model."""
    facts = {name: str(sent.about.get(name, "unknown"))[:200] for name in ("architecture", "parameters", "model")}
    return {**facts, "sites": sent.sites}


# The routes

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


def _filters(tag: Texts = None, architecture: Texts = None, task: Texts = None) -> dict[str, list[str]]:
    return check_filters(tag, architecture, task)


Filters = Annotated[dict[str, list[str]], Depends(_filters)]


def create_app(zoo: Zoo, hosts: Iterable[str] = ()) -> ASGIApp:
    """Return an ASGI application that shows a zoo and changes nothing; `hosts` are names it answers to."""
    # Opened by its absolute path, which is hidden from readers: a short one, such as "zoo", is a word of the messages.
    zoo = Zoo(zoo.folder.absolute(), wait=zoo.store.wait)
    app = FastAPI(title="sosie", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")
    _add_errors(app, zoo)
    _add_routes(app, zoo)
    return guarded(front_end(app), hosts)  # outside of everything, so that errors get the headers too


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _add_routes(app: FastAPI, zoo: Zoo) -> None:
    answers = AnswerCache(zoo.store.changes)
    maps: dict[str, Map] = {}  # the last map of each kind, on which fingerprints are placed
    most = most_bytes(zoo)
    room = asyncio.Semaphore(AT_ONCE)

    async def answer(
        question: Callable[..., Any], *args: Any, patient: bool = False, quick: bool = False, **options: Any
    ) -> bytes:
        """Ask a question about the zoo; the same question is answered once until the zoo changes."""
        make = partial(question, zoo, *args, **options)
        return await answers.ask((question.__name__, repr((args, options))), make, patient=patient, quick=quick)

    async def reply(question: Callable[..., Any], *args: Any, **options: Any) -> Response:
        return _json(await answer(question, *args, **options))

    @app.get("/api/zoo")
    async def about() -> Response:
        return await reply(questions.about, most_bytes=most)

    @app.get("/api/models")
    async def models(filters: Filters, text: Text = None, limit: Limit = 50, offset: Offset = 0) -> Response:
        return await reply(questions.models, limit, offset, text=text, **filters)

    @app.get("/api/models/{number}")
    async def model(number: Number) -> Response:
        return await reply(questions.model, number, quick=True)

    @app.get("/api/named")
    async def named(name: Annotated[str, Query(max_length=1000)]) -> Response:
        return await reply(questions.named, name, quick=True)

    @app.get("/api/models/{number}/near")
    async def near(
        number: Number,
        filters: Filters,
        k: K = 10,
        kind: Kind = "cka",
        by: Literal["model", "layer"] = "model",
        site: Annotated[str | None, Query(max_length=1000)] = None,
    ) -> Response:
        return await reply(questions.near, number, k=k, kind=kind, by=by, site=site, **filters)

    @app.get("/api/models/{number}/family")
    async def family(number: Number, k: K = 5) -> Response:
        return await reply(questions.family, number, k)

    @app.get("/api/pairs/{first}/{second}")
    async def pair(first: Number, second: Number, kind: Kind = "cka", exact: bool = False) -> Response:
        return await reply(questions.pair, first, second, kind=kind, exact=exact)

    @app.get("/api/runs")
    def all_runs() -> Response:
        return _json(as_json({"rows": questions.list_runs(zoo.folder)}))

    @app.get("/api/run")
    async def run(name: Annotated[str, Query(max_length=255)]) -> Response:
        question = ("run", name, *questions.stamp(zoo.folder, name))
        return _json(await answers.ask(question, lambda: questions.run(zoo.folder, name)))

    @app.get("/api/clusters")
    async def clusters(filters: Filters, k: Clusters = None, kind: Kind = "cka") -> Response:
        return await reply(questions.clusters, kind, k, filters, patient=True)

    @app.get("/api/clusters/{number}")
    async def members(
        number: Annotated[int, Path(ge=0, le=2**62)],
        filters: Filters,
        k: Clusters = None,
        kind: Kind = "cka",
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> Response:
        whole = await answer(questions.clusters, kind, k, filters, patient=True)
        return _json(await answers.work_out(lambda: questions.members(zoo, whole, number, limit, offset)))

    @app.get("/api/duplicates")
    async def duplicates(
        kind: Kind = "cka",
        threshold: Annotated[float, Query(ge=0.5, le=1)] = SAME,
        why: Literal["weights", "alike"] | None = None,
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> Response:
        whole = await answer(questions.duplicates, kind, threshold, patient=True)
        return _json(await answers.work_out(lambda: questions.page_of_duplicates(whole, why, limit, offset)))

    def new_map(zoo: Zoo, kind: str) -> dict[str, Any]:
        maps[kind] = zoo.map(kind)
        return questions.shown_map(maps[kind])

    @app.get("/api/map")
    async def map_(kind: Kind = "cka") -> Response:
        return await reply(new_map, kind, patient=True)

    @app.post("/api/near")
    async def near_file(request: Request, k: K = 10, kind: Kind = "cka", place: bool = False) -> Response:
        path = await received(request, most)  # outside of `room`: it may arrive slowly
        try:
            async with room:
                sent = await run_in_threadpool(checked, zoo, path)
                result = await run_in_threadpool(questions.near, zoo, sent, k=k, kind=kind, by="model")
                if place:
                    await answer(new_map, kind, patient=True)
                    result["place"] = await run_in_threadpool(questions.place, zoo, maps.get(kind), kind, sent)
                return _json(as_json({**result, "sent": described(sent)}))
        finally:
            os.unlink(path)


def _add_errors(app: FastAPI, zoo: Zoo) -> None:
    """Answer every error with JSON that holds a sentence and nothing more."""
    statuses: dict[type[Exception], int] = {
        UnknownModel: 404,
        ValueError: 422,  # among them DamagedFile and NotComparable
        ZooBusy: 503,
        ZooGone: 503,
        TimeoutError: 408,
        ClientDisconnect: 400,  # who sent the file is gone
    }

    def answer(status: int, text: str) -> Response:
        # Unread bytes of the body must not become the beginning of the next request.
        headers = {"Connection": "close"} if status in (408, 413) else None
        return Response(as_json({"error": text}), status, headers, "application/json")

    for kind, status in statuses.items():

        @app.exception_handler(kind)
        async def explain(_: Request, error: Exception, status: int = status) -> Response:
            return answer(status, str(error).replace(str(zoo.folder), "the zoo") or "it took too long to arrive")

    @app.exception_handler(RequestValidationError)
    async def explain_argument(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return answer(422, f"{first['loc'][-1]}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def explain_status(_: Request, error: HTTPException) -> Response:
        return answer(error.status_code, "there is no such page" if error.status_code == 404 else error.detail)

    @app.exception_handler(Exception)
    async def hide(_: Request, error: Exception) -> Response:
        return answer(500, "something went wrong here; the server's log has more")
