"""The HTTP server as its clients see it, with a tiny random model."""

import asyncio
import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from k3jax.config import ServeRun
from k3jax.serve import http as http_server
from k3jax.serve.app import App
from k3jax.serve.batch import EXIT_PREEMPTED, Batch, make_progress
from k3jax.serve.http import listener, main, read_keys
from k3jax.serve.jobs import Jobs
from k3jax.serve.loop import EngineLoop, Update
from k3jax.serve.metrics import Metrics
from k3jax.serve.request import Limits, Line
from k3jax.serve.results import OutputFile
from k3jax.serve.run import Loaded
from k3jax.serve.scheduler import Scheduler
from k3jax.text import Tokenizer
from tests.serve.conftest import RECIPE, save_run, write_recipe

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SLOTS, QUEUE, MAX_BODY = RECIPE["slots"], 2, 10_000
NEVER_ENDS = {"logit_bias": {str(token): -100 for token in Tokenizer.bytes().stop_ids}}
KEY = "a-key"


@dataclass
class Server:
    """How to talk to a running server."""

    port: int

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def ask(self, method: str, path: str, body: Any = None, *, key: str = KEY) -> tuple[int, Any, dict[str, str]]:
        with contextlib.closing(self.connect()) as connection:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"Authorization": f"Bearer {key}"} if key else {})
            answer = connection.getresponse()
            raw = answer.read()
            is_json = answer.getheader("content-type") == "application/json"
            return answer.status, json.loads(raw) if is_json else raw.decode(), dict(answer.getheaders())

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        status, answer, _ = self.ask("POST", path, body)
        assert status == 200, answer
        return answer

    def open_stream(self, path: str, **body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self.connect()
        data = json.dumps(body | {"stream": True}).encode()
        connection.request("POST", path, data, {"Authorization": f"Bearer {KEY}"})
        return connection, connection.getresponse()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        connection, answer = self.open_stream(path, **body)
        with contextlib.closing(connection):
            assert (answer.status, answer.getheader("content-type").split(";")[0]) == (200, "text/event-stream")
            *events, last, end = answer.read().decode().split("\n\n")
        assert (last, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def number(self, name: str) -> float:
        _, text, _ = self.ask("GET", "/metrics")
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(value)


@pytest.fixture(scope="module")
def jobs(model) -> Jobs:
    return Loaded(run=ServeRun(**RECIPE), model=model, tokenizer=Tokenizer.bytes()).jobs(lambda message: None)


@pytest.fixture(scope="module")
def server(jobs: Jobs, batch_bodies: list[dict]) -> Iterator[Server]:
    place = listener("127.0.0.1", 0)
    with EngineLoop(jobs, Metrics(jobs), seats=SLOTS + QUEUE) as loop:
        uvicorn = http_server.Server(App(loop, keys=("another", KEY), max_body=MAX_BODY), loop)
        thread = threading.Thread(target=uvicorn.run, kwargs={"sockets": [place]})
        thread.start()
        until(lambda: uvicorn.started)
        yield Server(place.getsockname()[1])
        uvicorn.should_exit = True
        thread.join()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "reasoning_effort": "low"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "def main(", "max_tokens": 20, "temperature": 0, "seed": 0}),
    (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 30, "seed": 5, "n": 3, "logprobs": 2}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 8, "seed": 6, "echo": True}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 200, "seed": 7, "stop": ["e", "ab"], "logprobs": 0, "top_k": 40}),
    (CHAT, HELLO | {"seed": 1, "logprobs": True, "top_logprobs": 2}),
    (CHAT, HELLO | {"seed": 2, "n": 2, "reasoning_effort": "none", "stop": "a"}),
    (CHAT, HELLO | {"seed": 3, "reasoning_effort": "none", "response_format": SCHEMA, "top_k": 20}),
    (CHAT, HELLO | {"seed": 4, "tools": [TOOL], "max_tokens": 6, "max_completion_tokens": 3}),
]


@pytest.fixture(scope="module")
def batch_bodies(jobs: Jobs, tmp_path_factory) -> list[dict[str, Any]]:
    """The answers of a batch file with the same requests, made before the server starts."""
    folder = tmp_path_factory.mktemp("batch")
    lines = [{"custom_id": str(i), "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(BODIES)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with OutputFile(folder / "out.jsonl") as output, make_progress(Console(file=io.StringIO())) as progress:
        Batch(jobs=jobs).run(folder / "in.jsonl", output, progress)
    records = {r["custom_id"]: r for r in map(json.loads, (folder / "out.jsonl").read_text().splitlines())}
    return [records[str(i)]["response"]["body"] for i in range(len(BODIES))]


def without_identity(body: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one request have in common; how much of its prompt was kept is not of it."""
    kept = {name: value for name, value in body.items() if name not in ("id", "created")}
    return kept | {"usage": without_cached(body["usage"])}


def without_cached(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def test_an_answer_is_that_of_a_batch_file(server: Server, batch_bodies: list[dict]) -> None:
    for (url, body), expected in zip(BODIES, batch_bodies, strict=True):
        assert without_identity(server.post(url, **body)) == without_identity(expected)


def put_together(events: list[dict[str, Any]], *, chat: bool) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream make."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        empty = {"message": {"content": None, "reasoning_content": None}} if chat else {"text": ""}
        one = found.setdefault(choice["index"], {"index": choice["index"], "logprobs": None} | empty)
        assert one.get("finish_reason") is None, "nothing follows the finish reason"
        one["finish_reason"] = choice["finish_reason"]
        for name, value in (choice["logprobs"] or {}).items():
            one["logprobs"] = (one["logprobs"] or {}) | {name: ((one["logprobs"] or {}).get(name) or []) + value}
        if not chat:
            one["text"] += choice["text"]
            continue
        message = one["message"]
        for name, value in choice["delta"].items():
            message[name] = value if message.get(name) is None else message[name] + value
    return [found[index] for index in sorted(found)]


def test_a_stream_put_together_is_the_whole_answer(server: Server, batch_bodies: list[dict]) -> None:
    for (url, body), expected in zip(BODIES, batch_bodies, strict=True):
        events = server.stream(url, **body, stream_options={"include_usage": True})
        assert len({(event["id"], event["seed"], event["model"]) for event in events}) == 1
        assert put_together(events, chat=url == CHAT) == expected["choices"]
        *others, last = (event["usage"] for event in events)
        assert others == [None] * len(others) and without_cached(last) == without_cached(expected["usage"])
        assert events[0]["object"] == ("chat.completion.chunk" if url == CHAT else "text_completion")


def test_a_stream_comes_in_pieces_as_tokens_do(server: Server) -> None:
    events = server.stream(COMPLETIONS, prompt="a", max_tokens=40, top_k=30, **NEVER_ENDS)
    assert len(events) > 10 and all("usage" not in event for event in events)


def test_requests_beside_each_other_get_the_answers_they_get_alone(server: Server, batch_bodies: list[dict]) -> None:
    seats = SLOTS + QUEUE
    with ThreadPoolExecutor(seats) as clients:
        asked = clients.map(lambda i: server.post(BODIES[i][0], **BODIES[i][1]), range(len(BODIES)))
        found = [without_identity(body) for body in asked]
    assert found == [without_identity(body) for body in batch_bodies]


def test_a_full_queue_says_when_to_come_back_and_clients_that_leave_make_room(server: Server) -> None:
    free = server.number("k3jax_pages_free")
    options = {"prompt": "long", "max_tokens": 500, **NEVER_ENDS}
    streams = [server.open_stream(COMPLETIONS, **options) for _ in range(SLOTS + QUEUE)]
    status, answer, headers = server.ask("POST", COMPLETIONS, {"prompt": "x"})
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (429, "queue_full", "invalid_request_error")
    assert int(headers["retry-after"]) >= 1
    assert server.ask("GET", "/health")[0] == 200
    for connection, answer in streams:
        answer.close()
        connection.close()
    until(lambda: server.number("k3jax_sequences_running") + server.number("k3jax_sequences_waiting") == 0)
    assert server.number("k3jax_pages_free") == free
    assert server.post(COMPLETIONS, prompt="x", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_client_that_leaves_before_a_whole_answer_ends_its_request(server: Server) -> None:
    before = server.number("k3jax_generated_tokens_total")
    body = json.dumps({"prompt": "long", "max_tokens": 500, **NEVER_ENDS}).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + body)
        until(lambda: server.number("k3jax_sequences_running") == 1)
    until(lambda: server.number("k3jax_sequences_running") == 0)
    assert server.number("k3jax_generated_tokens_total") - before < 500


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"{oops", "invalid_json", "not JSON: Expecting property name"),
        (b'{"prompt": NaN}', "invalid_json", "NaN is not JSON"),
        (b"\xff", "invalid_json", "not JSON"),
        (b"[" * 5000, "invalid_json", "nested deeper than 200 levels"),
        (b"[]", "invalid_request", "body must be a JSON object, not a list"),
        ({}, "invalid_request", "prompt is missing"),
        ({"prompt": "x", "stream": 1}, "invalid_request", "stream = 1: must be true or false"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "invalid_request", "needs stream = true"),
        ({"prompt": "x", "stream": True, "stream_options": {"nope": 1}}, "invalid_request", "unknown field 'nope'"),
        ({"prompt": "x", "max_token": 1}, "invalid_request", "did you mean 'max_tokens'?"),
        ({"prompt": "x", "max_tokens": 9999}, "context_length_exceeded", "the context holds 1024 tokens"),
        ({"prompt": "x", "best_of": 2}, "unsupported", "best_of"),
    ],
)
def test_a_bad_body_gets_openais_error(server: Server, body: Any, code: str, message: str) -> None:
    status, answer, _ = server.ask("POST", COMPLETIONS, body)
    assert status == 400
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert message in error["message"]


def test_unknown_addresses_and_methods(server: Server) -> None:
    for method, path, expected in (("POST", "/v1/nope", 404), ("GET", COMPLETIONS, 405), ("DELETE", "/health", 405)):
        status, answer, _ = server.ask(method, path)
        assert (status, answer["error"]["type"]) == (expected, "invalid_request_error")
        assert path in answer["error"]["message"]


def test_a_body_that_is_too_long_is_refused_before_it_is_read(server: Server) -> None:
    most = MAX_BODY
    for chunked in (False, True):
        body = b"x" * (most + 1)
        with contextlib.closing(server.connect()) as connection:
            key = {"Authorization": f"Bearer {KEY}"}
            connection.request("POST", COMPLETIONS, iter([body]) if chunked else body, key, encode_chunked=chunked)
            answer = connection.getresponse()
            assert answer.status == 413
            assert json.loads(answer.read())["error"]["message"].endswith(f"longer than {most} bytes")
    assert server.ask("POST", COMPLETIONS, b'"' + b"x" * (most - 2) + b'"')[0] == 400  # as long as allowed


def test_a_body_that_does_not_come_is_given_up_and_its_seat_is_free(server: Server, monkeypatch) -> None:
    monkeypatch.setattr("k3jax.serve.app.BODY_S", 0.2)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n"
    for _ in range(SLOTS + QUEUE + 1):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(head.encode() + b'{"prompt": ')
            answer = http.client.HTTPResponse(client)
            answer.begin()
            error = json.loads(answer.read())["error"]
        assert (answer.status, error["code"]) == (408, "request_timeout")
        assert "did not come within 0.2 s" in error["message"]


def test_a_client_that_leaves_amid_its_body_is_no_failure(server: Server, caplog) -> None:
    count = f'k3jax_requests_total{{endpoint="{COMPLETIONS}",status="499"}}'
    left = lambda: re.findall(rf"^{re.escape(count)} (\S+)$", server.ask("GET", "/metrics")[1], re.MULTILINE)  # noqa: E731
    before = left()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(head.encode() + b'{"prompt": ')
    until(lambda: left() != before)
    assert not caplog.records


@pytest.mark.parametrize("key", ["", "wrong", "a-key-and-more", "a-ke", "\xe9"])
def test_without_a_key_nothing_is_served(server: Server, key: str) -> None:
    for method, path in (("POST", COMPLETIONS), ("POST", CHAT), ("GET", "/v1/models")):
        status, answer, _ = server.ask(method, path, {"prompt": "x"} if method == "POST" else None, key=key)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert server.ask("GET", "/health", key=key)[0] == 200


def test_every_key_of_the_file_opens(server: Server) -> None:
    assert server.ask("GET", "/v1/models", key="another")[0] == 200


def test_models_health_and_metrics(server: Server) -> None:
    status, answer, _ = server.ask("GET", "/v1/models")
    (model,) = answer["data"]
    assert (status, model["id"], model["object"], model["max_model_len"]) == (200, "tiny", "model", 1024)
    assert server.ask("GET", "/health")[1] == {"status": "ok"}
    before = server.number("k3jax_generated_tokens_total")
    server.post(COMPLETIONS, prompt="abcd", max_tokens=5, **NEVER_ENDS)
    assert server.number("k3jax_generated_tokens_total") == before + 5
    assert server.number(f'k3jax_requests_total{{endpoint="{COMPLETIONS}",status="200"}}') >= 1
    assert server.number("k3jax_time_to_first_token_seconds_count") >= 1


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("http")
    save_run(model, folder / "run")
    write_recipe(folder / "serve.yaml")
    return folder


def test_a_signal_lets_begun_requests_finish_and_admits_no_other(folder: Path) -> None:
    paths = ["--config", folder / "serve.yaml", "--checkpoint", folder / "run"]
    command = [sys.executable, "-m", "k3jax.serve.http", *paths, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        log = iter(process.stderr)
        port = next(int(found[1]) for line in log if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)))
        connection, answer = Server(port).open_stream(COMPLETIONS, prompt="x", max_tokens=200, **NEVER_ENDS)
        first = answer.readline()
        process.send_signal(signal.SIGTERM)
        until(lambda: not _accepts(port))
        rest = answer.read().decode()
        connection.close()
        assert first.startswith(b"data: {") and rest.endswith("data: [DONE]\n\n")
        assert '"finish_reason": "length"' in rest
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_what_is_not_finished_in_time_is_cut_off_and_the_exit_code_says_so(table_engine, monkeypatch, capfd) -> None:
    monkeypatch.setattr(http_server, "DRAIN_S", 1.0)

    def slow(prompt: bytes) -> bytes:
        time.sleep(0.02)
        return b"x" * 1000

    limits = Limits(max_context=512, default_max_tokens=8, max_top_logprobs=0)
    jobs = Jobs(scheduler=Scheduler(table_engine(slow)), tokenizer=Tokenizer.bytes(), limits=limits, model_name="tiny")
    place = listener("127.0.0.1", 0)

    def visit() -> tuple[bytes, str]:
        connection, answer = Server(place.getsockname()[1]).open_stream(COMPLETIONS, prompt="x", max_tokens=500)
        with contextlib.closing(connection):
            first = answer.readline()
            os.kill(os.getpid(), signal.SIGTERM)  # the handler is the server's, which answers
            try:
                return first, answer.read().decode()
            except http.client.IncompleteRead as cut:
                return first, cut.partial.decode()

    place.listen()
    with ThreadPoolExecutor(1) as clients:
        client = clients.submit(visit)
        started = time.monotonic()
        assert http_server.answer(jobs, place, seats=2, max_body=MAX_BODY) == EXIT_PREEMPTED
        assert 1.0 <= time.monotonic() - started < 8
        first, rest = client.result(60)
    assert first.startswith(b"data: {") and "[DONE]" not in rest
    assert jobs.scheduler.num_running == 0
    assert "Traceback" not in capfd.readouterr().err


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", "none"], "--checkpoint none: no such directory"),
        (["--queue", "-1"], "--queue -1: must be a number of at least 0"),
        (["--max-body-mib", "0"], "--max-body-mib 0.0: must be a number of at least 0.001"),
        (["--max-body-mib", "nan"], "--max-body-mib nan: must be a number of at least 0.001"),
        (["--max-body-mib", "inf"], "--max-body-mib inf: must be a number of at least 0.001"),
        (["--api-key-file", "EMPTY"], "holds no key"),
        (["--api-key-file", "none"], "--api-key-file none: cannot be read"),
        (["--host", "256.0.0.1"], "--host 256.0.0.1 --port 0: cannot listen there"),
        (["--port", "70000"], "--port 70000: must be from 0 to 65535"),
        (["slot=4"], "unknown key slot; did you mean slots?"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(folder, capsys, monkeypatch, options, message) -> None:
    (folder / "empty").write_text("\n")
    options = [str(folder / "empty") if option == "EMPTY" else option for option in options]
    paths = ["--config", str(folder / "serve.yaml"), "--checkpoint", str(folder / "run"), "--port", "0"]
    monkeypatch.setattr(sys, "argv", ["http", *paths, *options])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("k3jax.serve.http: ") and message in line


def test_keys_are_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(" one \n\ntwo\n")
    assert read_keys(tmp_path / "keys") == ("one", "two")
    assert read_keys(None) == ()


def test_many_clients_that_come_and_go_leave_nothing(server: Server) -> None:
    free = server.number("k3jax_pages_free")

    def visit(number: int) -> int:
        connection, answer = server.open_stream(COMPLETIONS, prompt=f"{number}", max_tokens=300, **NEVER_ENDS)
        with contextlib.closing(connection):
            for _ in range(number % 5):
                answer.readline()
            return answer.status

    with ThreadPoolExecutor(6) as clients:
        statuses = set(clients.map(visit, range(40)))
    assert statuses <= {200, 429} and 200 in statuses
    until(lambda: server.number("k3jax_sequences_running") + server.number("k3jax_sequences_waiting") == 0)
    assert server.number("k3jax_pages_free") == free


def test_when_the_engine_fails_everyone_is_told(table_engine) -> None:
    def broken(prompt: bytes) -> bytes:
        raise RuntimeError("out of order")

    limits = Limits(max_context=64, default_max_tokens=8, max_top_logprobs=0)
    jobs = Jobs(
        scheduler=Scheduler(table_engine(broken)), tokenizer=Tokenizer.bytes(), limits=limits, model_name="tiny"
    )
    lines = [Line(custom_id=name, url=COMPLETIONS, method="POST", body={"prompt": name}) for name in "ab"]

    async def ask(loop: EngineLoop) -> list[Update]:
        tickets = [loop.enter() for _ in lines]
        for ticket, line in zip(tickets, lines, strict=True):
            ticket.start(jobs.parse(line), line, streams=False)
        return [update for ticket in tickets async for update in ticket.updates()]

    with EngineLoop(jobs, Metrics(jobs), seats=2) as loop:
        updates = asyncio.run(ask(loop))
        assert [update.error.code for update in updates] == ["engine_failed"] * 2
        assert "out of order" in str(updates[0].error)
        assert isinstance(loop.failure, RuntimeError)
