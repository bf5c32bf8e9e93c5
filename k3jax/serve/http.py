"""An OpenAI-compatible endpoint over a checkpoint: `python -m k3jax.serve.http --help`."""

from __future__ import annotations

import argparse
import ipaddress
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvicorn
from rich.console import Console

from k3jax.config import ConfigError, ServeRun, load_run
from k3jax.nn.placement import join_processes
from k3jax.serve.app import App
from k3jax.serve.batch import DRAIN_S, EXIT_PREEMPTED
from k3jax.serve.hosts import is_first
from k3jax.serve.jobs import Jobs
from k3jax.serve.loop import EngineLoop, follow
from k3jax.serve.metrics import Metrics
from k3jax.serve.run import Loaded, check_recipe

DESCRIPTION = """\
Answers POST /v1/chat/completions and /v1/completions as OpenAI's API does, whole or streamed ("stream": true, with
"stream_options": {"include_usage": true}), and GET /v1/models, /health and /metrics (Prometheus).

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "low", "stream": true}'

Bodies are those of serve.py, checked and answered by the same code; `python serve.py --help` lists the fields. Errors
are OpenAI's: {"error": {"message", "type", "param", "code"}}. 400: the request; 401: the key; 408, 413: the body took
too long or is too long; 429: the queue is full, see Retry-After; 500: the model's answer is not finite, or the engine
failed (then /health says 503). A client that leaves ends its request. key=value overrides the recipe.

Exit codes: 0 stopped by SIGTERM or Ctrl-C with every request answered (no new ones, up to 20 seconds for those at
hand), 75 stopped with some cut short, 1 the engine failed, 2 a mistake in the call or its files."""


def main() -> int:
    """Parse the command line, serve until a signal, and turn a mistake into one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m k3jax.serve.http",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="recipe, such as configs/serve/tiny_cpu.yaml")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="a training run, or a released checkpoint's folder"
    )
    parser.add_argument("--tokenizer", default="", help='"bytes" or a folder; default: the checkpoint\'s own')
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any that is free (default: 8000)")
    parser.add_argument("--queue", type=int, default=64, help="requests that may wait beside those with a slot")
    parser.add_argument("--max-body-mib", type=float, default=32, help="of a request (default: 32)")
    parser.add_argument("--api-key-file", type=Path, help="keys, one a line; a request must have one of them")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
    args = parser.parse_intermixed_args()
    try:
        join_processes()
        return serve(load_run(ServeRun, args.config, args.overrides), args)
    except ConfigError as error:
        print(f"k3jax.serve.http: {error}", file=sys.stderr)
        return 2


def serve(run: ServeRun, args: argparse.Namespace) -> int:
    """Load, compile, listen, and answer until a signal; returns the exit code. Raises `ConfigError`."""
    check_recipe(run)
    for name, value, low in (("--queue", args.queue, 0), ("--max-body-mib", args.max_body_mib, 0.001)):
        if not low <= value < float("inf"):
            raise ConfigError(f"{name} {value}: must be a number of at least {low}")
    if not 0 <= args.port < 2**16:
        raise ConfigError(f"--port {args.port}: must be from 0 to 65535")
    keys, place = read_keys(args.api_key_file), listener(args.host, args.port if is_first() else 0)
    console = Console(stderr=True, highlight=False, quiet=not is_first())
    if not keys and not _is_loopback(place):
        console.print(f"{args.host}: whoever reaches this address can use the model; --api-key-file asks for a key")
    jobs = Loaded.of(run, args.checkpoint, args.tokenizer).jobs(partial(console.print, style="dim"))
    if not is_first():
        follow(jobs)
        return 0
    place.listen()  # from here on who connects is answered
    console.print(f"{jobs.model_name}: listening on http://{_address(place)}")
    seats, max_body = run.slots + args.queue, int(args.max_body_mib * 2**20)
    return answer(jobs, place, keys=keys, seats=seats, max_body=max_body)


def answer(jobs: Jobs, place: socket.socket, *, keys: tuple[str, ...] = (), seats: int, max_body: int) -> int:
    """Answer who connects to `place` until a signal; returns the exit code. Raises what the engine has failed with."""
    with EngineLoop(jobs, Metrics(jobs), seats=seats) as loop:
        Server(App(loop, keys=keys, max_body=max_body), loop).run(sockets=[place])
        if loop.failure is not None:
            raise loop.failure
    return EXIT_PREEMPTED if loop.dropped else 0


class Server(uvicorn.Server):
    """Uvicorn with what this server needs of it; it stops where the engine has failed."""

    def __init__(self, app: App, loop: EngineLoop) -> None:
        self._engine = loop
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(DRAIN_S),
        )
        super().__init__(config)

    async def on_tick(self, counter: int) -> bool:
        return self._engine.failure is not None or await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the server. Uvicorn would raise them again after it; here they have been answered then."""
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        previous = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.draining = True
        await super().shutdown(sockets)


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys in a file, one a line; none without a file. Raises `ConfigError`."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: cannot be read ({error})") from error
    if not lines:
        raise ConfigError(f"--api-key-file {path}: holds no key; without the option no key is asked for")
    return tuple(lines)


def listener(host: str, port: int) -> socket.socket:
    """A socket bound to an address; nobody can connect before it listens. Raises `ConfigError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family, socket.SOCK_STREAM)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there ({error})") from error
    return place


def _address(place: socket.socket) -> str:
    host, port = place.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(place: socket.socket) -> bool:
    return ipaddress.ip_address(place.getsockname()[0]).is_loopback


if __name__ == "__main__":
    sys.exit(main())
