"""`serve.py` on a mesh of eight devices, in one process and in two: the answers of one device."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from k3jax.config import ServeRun, load_run
from k3jax.serve.run import Paths, serve
from tests.serve.conftest import save_run, write_recipe

SHAPES = ["slots=4", "prefill_chunk=16", "prefill_rows=4"]
MESHES = {
    "data 2, tensor 2, context 2": [*SHAPES, "mesh.data=2", "mesh.tensor=2", "mesh.context=2"],
    "expert 2, tensor 2, data 2": [*SHAPES, "mesh.expert=2", "mesh.tensor=2", "mesh.data=2"],
}


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mesh")
    save_run(model, folder / "run")
    write_recipe(folder / "serve.yaml", score_prompts=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(line(i)) + "\n" for i in range(14)) + "{oops\n")
    return folder


def line(index: int) -> dict:
    """Most share a beginning; there are choices, penalties, a chat, a prompt that is scored, one that is too long."""
    body = {"prompt": [*range(40), *range(index % 7), index], "max_tokens": 6 + index, "seed": index, "logprobs": 1}
    url = "/v1/completions"
    if index == 3:
        url, messages = "/v1/chat/completions", [{"role": "user", "content": "x"}]
        body = {"messages": messages, "reasoning_effort": "none", "max_tokens": 20}
    body |= {"n": 3} if index == 5 else {}
    body |= {"frequency_penalty": 1.0, "logit_bias": {"7": 4}} if index == 6 else {}
    body |= {"echo": True} if index == 7 else {}
    body |= {"prompt": [1] * 2000} if index == 8 else {}
    return {"custom_id": f"id{index}", "method": "POST", "url": url, "body": body}


def start(root: Path, folder: Path, output: str, devices: int, *overrides: str, **environment: str) -> subprocess.Popen:
    paths = [f"--{name}={folder / value}" for name, value in (("input", "in.jsonl"), ("output", output))]
    return launch([str(root / "serve.py"), *paths, *overrides], folder, devices, environment)


def launch(command: list[str], folder: Path, devices: int, environment: dict[str, str]) -> subprocess.Popen:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    paths = [f"--{name}={folder / value}" for name, value in (("config", "serve.yaml"), ("checkpoint", "run"))]
    environment = os.environ | {"XLA_FLAGS": flags} | environment
    return subprocess.Popen([sys.executable, *command, *paths], stderr=subprocess.PIPE, text=True, env=environment)


def two_processes() -> list[dict[str, str]]:
    """The environments of two processes that will find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    shared = {"K3JAX_COORDINATOR": coordinator, "K3JAX_PROCESSES": "2"}
    return [shared | {"K3JAX_PROCESS": str(process)} for process in range(2)]


def finish(*processes: subprocess.Popen) -> None:
    errors = [process.communicate(timeout=800)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), errors


def results(folder: Path, output: str) -> dict[str, tuple[dict, list[float], int]]:
    """Of each line: what must be equal, its log-probabilities, and its cached tokens."""
    found = {}
    for record in map(json.loads, (folder / output).read_text().splitlines()):
        body = (record["response"] or {}).get("body") or {}
        logprobs, cached = [], 0
        for choice in body.get("choices", []):
            values = choice.pop("logprobs") or {}
            logprobs += [value for value in values.get("token_logprobs", []) if value is not None]
        if "usage" in body:
            cached = body["usage"].pop("prompt_tokens_details")["cached_tokens"]
        for name in ("id", "created"):
            body.pop(name, None)
        found[str(record["custom_id"])] = ({"body": body, "error": record["error"]}, logprobs, cached)
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict:
    """The answers of one device, by programs of other shapes."""
    paths = Paths(checkpoint=folder / "run", input=folder / "in.jsonl", output=folder / "one.jsonl")
    assert serve(load_run(ServeRun, folder / "serve.yaml"), paths) == 0
    return results(folder, "one.jsonl")


def check(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for key, (one, logprobs, _) in found.items():
        assert one == expected[key][0], key
        assert logprobs == pytest.approx(expected[key][1], abs=1e-4), key
    assert sum(cached for _, _, cached in found.values()) > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if "expert" in name else []) for name in MESHES]
)
def test_a_mesh_gives_the_answers_of_one_device(root: Path, folder: Path, expected: dict, name: str) -> None:
    output = f"{name[:4]}.jsonl"
    finish(start(root, folder, output, 8, *MESHES[name]))
    check(results(folder, output), expected)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_two_processes_write_one_file_with_the_answers_of_one_device(root: Path, folder: Path, expected: dict) -> None:
    mesh = MESHES["data 2, tensor 2, context 2"]
    for _ in range(2):  # the second time everything is done already
        finish(*(start(root, folder, "two.jsonl", 4, *mesh, **environment) for environment in two_processes()))
        check(results(folder, "two.jsonl"), expected)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_two_processes_serve_one_address(folder: Path, expected: dict) -> None:
    command = ["-m", "k3jax.serve.http", "--port=0", *MESHES["data 2, tensor 2, context 2"]]
    first, second = (launch(command, folder, 4, environment) for environment in two_processes())
    log = iter(first.stderr)
    port = next(int(found[1]) for text in log if (found := re.search(r"http://127\.0\.0\.1:(\d+)", text)))
    time.sleep(3)  # idle
    for index in (0, 1, 6):
        asked = line(index)
        url, body = f"http://127.0.0.1:{port}{asked['url']}", json.dumps(asked["body"]).encode()
        with urllib.request.urlopen(url, body, timeout=300) as answer:
            choices = json.loads(answer.read())["choices"]
        assert [choice["text"] for choice in choices] == [
            choice["text"] for choice in expected[f"id{index}"][0]["body"]["choices"]
        ]
    first.send_signal(signal.SIGTERM)
    assert (first.wait(60), second.wait(60)) == (0, 0), second.stderr.read()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("slots=3", "slots = 3: the mesh shares rows out 2 ways; slots=4 fits"),
        ("prefill_rows=1", "prefill_rows = 1: the mesh shares rows out 2 ways; prefill_rows=2 fits"),
        ("prefill_chunk=10", "prefill_chunk = 10: pages in pieces on 4 devices need a multiple of 8"),
        ("mesh.tensor=3", "mesh = data 2 x tensor 3 x context 2 = 12 devices, but there are 8"),
    ],
)
@pytest.mark.soak
def test_a_recipe_that_does_not_fit_its_mesh_is_refused(root: Path, folder: Path, override: str, message: str) -> None:
    process = start(root, folder, "new.jsonl", 8, *MESHES["data 2, tensor 2, context 2"], override)
    _, error = process.communicate(timeout=200)
    assert (process.returncode, message in error) == (2, True), error
