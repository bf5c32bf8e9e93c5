"""The endpoints of the HTTP server: OpenAI's completions, chat completions and models, health, metrics.

A body is checked by the code that checks a line of a batch file, so the two accept and answer the same.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from k3jax.serve.fields import RequestError, check_names, field, flag
from k3jax.serve.loop import BusyError, EngineLoop, Ticket, Update
from k3jax.serve.request import CHAT, COMPLETIONS, Line, parse_json
from k3jax.serve.results import envelope, error_body

RETRY_AFTER_S = 1
BODY_S = 60.0  # in which a body must have come
CLIENT_LEFT = 499  # nobody sees it but the metrics


@dataclass(frozen=True)
class Asked:
    """A request as its client wants it answered; `line` is still unchecked."""

    line: Line
    streams: bool
    counts: bool  # a stream ends with the number of tokens


class App:
    """The endpoints over an engine's loop. `keys` empty lets everyone in; bodies have at most `max_body` bytes."""

    def __init__(self, loop: EngineLoop, *, keys: tuple[str, ...] = (), max_body: int) -> None:
        self._loop, self._max_body, self._created = loop, max_body, int(time.time())
        self._keys = [key.encode() for key in keys]
        routes = [
            Route(CHAT, self._answer, methods=["POST"]),
            Route(COMPLETIONS, self._answer, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        self._app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _server_error})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application. What the server cuts off at its end has no traceback: the loop has counted it."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._loop.draining:
                raise

    async def _answer(self, request: HTTPRequest) -> Response:
        response = await self._respond(request)
        self._loop.metrics.answers.labels(request.url.path, response.status_code).inc()
        return response

    async def _respond(self, request: HTTPRequest) -> Response:
        if not self._may_enter(request.headers):
            return _wrong_key()
        try:
            ticket = self._loop.enter()
        except BusyError:
            message = f"{self._loop.seats} requests are being answered or wait; try again"
            return _error(message, 429, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})
        keep = False
        try:
            raw = await self._read(request)
            asked = _asked(request.url.path, raw)
            job = await asyncio.to_thread(self._loop.jobs.parse, asked.line)  # reads prompts and images: no hurry here
            ticket.start(job, asked.line, streams=asked.streams)
            if not asked.streams:
                return await self._whole(request, ticket)
            keep = True
            return _Stream(self._chunks(ticket, asked.counts), ticket)
        except RequestError as error:
            return _reply(error_body(error, status=400), 400)
        except HTTPException as error:
            return _http_error(request, error)
        except ClientDisconnect:  # amid its body
            return Response(status_code=CLIENT_LEFT)
        finally:
            if not keep:
                ticket.close()

    def _may_enter(self, headers: Mapping[str, str]) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]  # all of them, always
        return not self._keys or (scheme.lower() == "bearer" and any(matches))

    async def _read(self, request: HTTPRequest) -> bytes:
        """The body. Raises `HTTPException` where it is too long or too slow."""
        length = request.headers.get("content-length", "")
        too_long = HTTPException(413, f"the body is longer than {self._max_body} bytes")
        if length.isdecimal() and int(length) > self._max_body:
            raise too_long
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_body:
                        raise too_long
                    parts.append(part)
        except TimeoutError as error:
            raise HTTPException(408, f"the body did not come within {BODY_S:g} s") from error
        return b"".join(parts)

    async def _whole(self, request: HTTPRequest, ticket: Ticket) -> Response:
        """The answer in one piece; the client may leave before."""
        update = await _unless_gone(request, _last(ticket))
        if update is None:
            return Response(status_code=CLIENT_LEFT)
        if update.error is not None:
            return _reply(error_body(update.error, status=500), 500)
        assert update.body is not None
        return _reply(update.body)

    async def _chunks(self, ticket: Ticket, counts: bool) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        assert ticket.job is not None
        head = envelope(ticket.job, model=self._loop.jobs.model_name, chunk=True)
        no_count: dict[str, Any] = {"usage": None} if counts else {}
        if ticket.job.thinking is not None:
            for choice in range(len(ticket.job.requests)):
                first = {"index": choice, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None}
                yield _event(head | {"choices": [first]} | no_count)
        async for update in ticket.updates():
            for delta in update.deltas:
                yield _event(head | {"choices": [delta]} | no_count)
            if update.error is not None:
                yield _event(error_body(update.error, status=500))
            elif update.is_last and counts:
                yield _event(head | {"choices": [], "usage": update.usage})
        yield "data: [DONE]\n\n"

    async def _models(self, request: HTTPRequest) -> Response:
        if not self._may_enter(request.headers):
            return _wrong_key()
        jobs = self._loop.jobs
        model = {"id": jobs.model_name, "object": "model", "created": self._created, "owned_by": "k3jax"}
        return _reply({"object": "list", "data": [model | {"max_model_len": jobs.limits.max_context}]})

    async def _health(self, request: HTTPRequest) -> Response:
        if self._loop.failure is not None:
            return _reply({"status": "failed", "error": str(self._loop.failure)}, 503)
        return _reply({"status": "ok"})

    async def _metrics(self, request: HTTPRequest) -> Response:
        return Response(self._loop.metrics.text(), media_type="text/plain; version=0.0.4")


class _Stream(StreamingResponse):
    """Server-sent events of a ticket, which is closed however the connection ends."""

    def __init__(self, events: AsyncIterator[str], ticket: Ticket) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.close()


def _asked(url: str, raw: bytes) -> Asked:
    """Take apart what concerns the connection and what the answer. Raises `RequestError`."""
    body = parse_json(raw, "JSON", code="invalid_json")
    if not isinstance(body, dict):
        return Asked(_line(url, body), streams=False, counts=False)  # refused by its own check
    given = {name: value for name, value in body.items() if value is not None}
    streams = flag(given, "stream", False)
    options = field(given, "stream_options", {}, lambda value: isinstance(value, dict), "an object")
    check_names(options, known=("include_usage",), neutral={})
    if options and not streams:
        raise RequestError("stream_options: needs stream = true", param="stream_options")
    rest = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    return Asked(_line(url, rest), streams=streams, counts=flag(options, "include_usage", False))


def _line(url: str, body: Any) -> Line:
    return Line(custom_id=uuid.uuid4().hex, url=url, method="POST", body=body)


async def _last(ticket: Ticket) -> Update:
    return [update async for update in ticket.updates()][-1]


async def _unless_gone(request: HTTPRequest, work: Coroutine[Any, Any, Update]) -> Update | None:
    """The result of `work`; None where the client leaves before."""
    wanted, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((wanted, gone), return_when=asyncio.FIRST_COMPLETED)
        return wanted.result() if wanted.done() else None
    finally:
        wanted.cancel()
        gone.cancel()


async def _gone(request: HTTPRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _reply(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _error(message: str, status: int, *, code: str, headers: dict[str, str] | None = None) -> Response:
    return _reply(error_body(RequestError(message, code=code), status=status), status, headers)


def _wrong_key() -> Response:
    return _error("the API key is missing or wrong", 401, code="invalid_api_key")


def _http_error(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "unknown_url", 405: "method_not_allowed", 408: "request_timeout", 413: "body_too_long"}
    text = f"{request.method} {request.url.path}: {error.detail}"
    return _error(text, error.status_code, code=codes.get(error.status_code, "http_error"))


def _server_error(request: HTTPRequest, error: Exception) -> Response:
    return _error("the server failed", 500, code="server_failed")
