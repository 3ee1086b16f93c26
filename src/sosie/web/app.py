"""The explorer's routes: JSON under /api, and the front end's own files."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..files import DamagedFile
from ..report.page import style_file
from ..zoo import Fingerprint, Zoo, ZooBusy
from ..zoo.fingerprints import MOST_SITES
from ..zoo.questions import SAME
from ..zoo.store import Facts, UnknownModel, ZooGone, check_filters
from . import questions
from .cache import AnswerCache, as_json
from .questions import Maps

# The front end's files, as they came with sosie

FOLDER = pathlib.Path(__file__).with_name("static")
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class FrontEnd:
    """Answers for the files, which were read when the server started; every other path goes on to the application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.files: dict[str, tuple[bytes, str, str]] = {}  # content, type, ETag
        for path in (*sorted(FOLDER.iterdir()), style_file("colours")):
            if path.suffix in KINDS:
                content = path.read_bytes()
                tag = hashlib.blake2b(content, digest_size=12).hexdigest()
                self.files[f"/{path.name}"] = content, KINDS[path.suffix], f'"{tag}"'
        self.files["/"] = self.files["/index.html"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = self.files.get(scope["path"]) if scope["type"] == "http" else None
        if file is None or scope["method"] not in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        content, kind, tag = file
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if Headers(scope=scope).get("if-none-match") == tag:
            await Response(status_code=304, headers=headers)(scope, receive, send)
        else:
            await Response(content, media_type=kind, headers=headers)(scope, receive, send)


# What every request passes: who may ask, and what a browser may do with the answer
#
# A page from elsewhere can make a browser send requests to this machine. By a name of its own that it points here (DNS
# rebinding) it could even read the answers: so only requests under names of this machine are answered. It may not post
# either, nor frame the pages.

LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
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
    """The name in a Host header, without the port; None where it is none."""
    try:
        return urlsplit(f"//{text}").hostname if text and "@" not in text and "/" not in text else None
    except ValueError:
        return None


class Guard:
    """Refuses hosts that are not named and posts from other pages; puts the headers on every answer."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = ()) -> None:
        self.app = app
        self.hosts = {*LOOPBACK, *(name.lower() for name in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [pair for pair in message["headers"] if pair[0] not in RAW]
                if all(name != b"cache-control" for name, _ in own):
                    own.append((b"cache-control", b"no-store"))
                message["headers"] = [*own, *RAW.items()]
            await send(message)

        refused = self._refusal(scope["method"], Headers(scope=scope))
        await (refused or self.app)(scope, receive, send_guarded)

    def _refusal(self, method: str, headers: Headers) -> JSONResponse | None:
        host = host_of(headers.get("host", ""))
        if len(headers.getlist("host")) != 1 or host not in self.hosts:
            text = "not a name of this server: `sosie serve --allow NAME` answers to more names"
            return JSONResponse({"error": f"{str(host)[:100]!r} is {text}"}, 421)
        if method not in ("GET", "HEAD", "POST"):
            return JSONResponse({"error": "the explorer only reads"}, 405)
        origin = headers.get("origin")
        if method == "POST" and origin is not None and origin.lower().partition("://")[2] != headers["host"].lower():
            return JSONResponse({"error": "another page may not send files here"}, 403)
        return None


# A fingerprint that a browser sends: read up to a limit, checked as any file from others, never kept

HEAD = 2 * 2**20  # bytes for what is not vectors
SECONDS = 60.0  # that a file may take to arrive
AT_ONCE = 4  # that are checked and looked up


def most_bytes(zoo: Zoo) -> int:
    """What a fingerprint of this zoo has at most."""
    about = zoo.settings
    return HEAD + 4 * MOST_SITES * (about.n * (about.n - 1) // 2 + 3 * about.size)


async def received(request: Request, most: int) -> pathlib.Path:
    """The body in a temporary file, which whoever asked deletes."""
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
    """The fingerprint, if it is one and was made as those of the zoo."""
    try:
        found = Fingerprint.load(path)
    except DamagedFile as error:
        raise DamagedFile(str(error).replace(str(path), "the file")) from error
    zoo.settings.record("the file", found, Facts())
    return found


def described(found: Fingerprint) -> dict[str, Any]:
    """What a fingerprint says of its model."""
    said = {name: str(found.about.get(name, "unknown"))[:200] for name in ("architecture", "parameters", "model")}
    return {**said, "sites": found.sites}


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
    """An ASGI application that shows a zoo and changes nothing; `hosts` are names it answers to beside loopback's."""
    # By its whole path, which errors name and readers are not told: a short one, "zoo" say, is a word of the messages.
    zoo = Zoo(zoo.folder.absolute(), wait=zoo.store.wait)
    app = FastAPI(title="sosie", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")
    answers = AnswerCache(zoo.store.changes)
    _tell_errors(app, zoo)
    _about_models(app, zoo, answers)
    _about_all(app, zoo, answers)
    return Guard(FrontEnd(app), hosts)  # outside of everything, so that answers about errors pass it too


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _key(filters: dict[str, list[str]]) -> tuple[Any, ...]:
    return tuple((name, *texts) for name, texts in filters.items())


def _about_models(app: FastAPI, zoo: Zoo, answers: AnswerCache) -> None:
    """Routes about some models: lists of them, one, two, and what is near one."""

    @app.get("/api/models")
    async def models(filters: Filters, text: Text = None, limit: Limit = 50, offset: Offset = 0) -> Response:
        make = partial(zoo.store.page, limit, offset, text=text, **filters)
        return _json(await answers.ask(("models", text, limit, offset, *_key(filters)), make))

    @app.get("/api/models/{number}")
    async def model(number: Number) -> Response:
        return _json(await answers.ask(("model", number), lambda: questions.model(zoo, number), quick=True))

    @app.get("/api/models/{number}/near")
    async def near(
        number: Number,
        filters: Filters,
        k: K = 10,
        kind: Kind = "cka",
        by: Literal["model", "layer"] = "model",
        site: Annotated[str | None, Query(max_length=1000)] = None,
    ) -> Response:
        make = partial(questions.near, zoo, number, k=k, kind=kind, by=by, site=site, **filters)
        return _json(await answers.ask(("near", number, k, kind, by, site, *_key(filters)), make))

    @app.get("/api/models/{number}/family")
    async def family(number: Number, k: K = 5) -> Response:
        return _json(await answers.ask(("family", number, k), lambda: questions.family(zoo, number, k)))

    @app.get("/api/pairs/{first}/{second}")
    async def pair(first: Number, second: Number, kind: Kind = "cka", exact: bool = False) -> Response:
        make = partial(questions.pair, zoo, first, second, kind=kind, exact=exact)
        return _json(await answers.ask(("pair", first, second, kind, exact), make))

    @app.get("/api/runs")
    def all_runs() -> Response:
        return _json(as_json({"rows": questions.listed(zoo.folder)}))

    @app.get("/api/run")
    async def run(name: Annotated[str, Query(max_length=255)]) -> Response:
        question = ("run", name, *questions.stamp(zoo.folder, name))
        return _json(await answers.ask(question, lambda: questions.opened(zoo.folder, name)))


def _about_all(app: FastAPI, zoo: Zoo, answers: AnswerCache) -> None:
    """Routes about all models: what the zoo is, groups, duplicates, the map, and where a sent fingerprint belongs."""
    maps = Maps(zoo)
    most = most_bytes(zoo)
    room = asyncio.Semaphore(AT_ONCE)

    @app.get("/api/zoo")
    async def about() -> Response:
        return _json(await answers.ask(("zoo",), lambda: questions.about(zoo) | {"most_bytes": most}))

    async def clustered(kind: str, k: int | None, filters: dict[str, list[str]]) -> bytes:
        make = partial(questions.clusters, zoo, kind, k, filters)
        return await answers.ask(("clusters", kind, k, *_key(filters)), make, patient=True)

    @app.get("/api/clusters")
    async def clusters(filters: Filters, k: Clusters = None, kind: Kind = "cka") -> Response:
        return _json(await clustered(kind, k, filters))

    @app.get("/api/clusters/{number}")
    async def members(
        number: Annotated[int, Path(ge=0, le=2**62)],
        filters: Filters,
        k: Clusters = None,
        kind: Kind = "cka",
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> Response:
        whole = await clustered(kind, k, filters)
        return _json(await answers.work_out(lambda: questions.members(zoo, whole, number, limit, offset)))

    @app.get("/api/duplicates")
    async def duplicates(
        kind: Kind = "cka",
        threshold: Annotated[float, Query(ge=0.5, le=1)] = SAME,
        why: Literal["weights", "alike"] | None = None,
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> Response:
        make = partial(questions.duplicates, zoo, kind, threshold)
        whole = await answers.ask(("duplicates", kind, threshold), make, patient=True)
        return _json(await answers.work_out(lambda: questions.page_of_duplicates(whole, why, limit, offset)))

    async def map_of(kind: str) -> bytes:
        return await answers.ask(("map", kind), lambda: maps.answer(kind), patient=True)

    @app.get("/api/map")
    async def map_(kind: Kind = "cka") -> Response:
        return _json(await map_of(kind))

    @app.post("/api/near")
    async def near(request: Request, k: K = 10, kind: Kind = "cka", place: bool = False) -> Response:
        path = await received(request, most)  # with no place taken: it may arrive slowly
        try:
            async with room:
                sent = await run_in_threadpool(checked, zoo, path)
                answer = await run_in_threadpool(questions.near, zoo, sent, k=k, kind=kind, by="model")
                if place:
                    await map_of(kind)
                    answer["place"] = await run_in_threadpool(maps.place, kind, sent)
                return _json(as_json({**answer, "sent": described(sent)}))
        finally:
            os.unlink(path)


def _tell_errors(app: FastAPI, zoo: Zoo) -> None:
    """Every error is JSON with a sentence in it, and never more than that."""
    told: dict[type[Exception], int] = {
        UnknownModel: 404,
        questions.UnknownRun: 404,
        ValueError: 422,  # among them DamagedFile and NotComparable
        ZooBusy: 503,
        ZooGone: 503,
        TimeoutError: 408,
    }

    def answer(status: int, text: str) -> Response:
        # Bytes that were not read are left behind; the next request must not begin with them.
        headers = {"Connection": "close"} if status in (408, 413) else None
        return Response(as_json({"error": text}), status, headers, "application/json")

    for kind, status in told.items():

        @app.exception_handler(kind)
        async def tell(_: Request, error: Exception, status: int = status) -> Response:
            return answer(status, str(error).replace(str(zoo.folder), "the zoo") or "it took too long to arrive")

    @app.exception_handler(RequestValidationError)
    async def tell_wrong(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return answer(422, f"{first['loc'][-1]}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def tell_plain(_: Request, error: HTTPException) -> Response:
        return answer(error.status_code, "there is no such page" if error.status_code == 404 else error.detail)

    @app.exception_handler(Exception)
    async def tell_any(_: Request, error: Exception) -> Response:
        return answer(500, "something went wrong here; the server's log has more")
