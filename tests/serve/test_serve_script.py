"""`serve.py` as a user runs it: a checkpoint, a batch, signals, mistakes."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serve.conftest import save_run, write_recipe


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    """A folder with a run's checkpoint, a recipe and a batch."""
    folder = tmp_path_factory.mktemp("serve")
    save_run(model, folder / "run")
    write_recipe(folder / "serve.yaml")
    (folder / "in.jsonl").write_text("".join(request(i) for i in range(30)))
    (folder / "twice.jsonl").write_text(request(1) * 2)
    return folder


def request(index: int) -> str:
    """Every seventh line is a chat; others differ in prompt, penalties and choices."""
    url, body = "/v1/completions", {"prompt": [1 + index % 50, *range(index % 20)], "max_tokens": 70, "logprobs": 1}
    if index % 7 == 3:
        user = {"role": "user", "content": f"{index}"}
        url, body = (
            "/v1/chat/completions",
            {"messages": [user], "reasoning_effort": "none", "logprobs": True, "max_tokens": 70},
        )
    body |= {"frequency_penalty": 0.5, "logit_bias": {"7": 3}} if index % 5 == 1 else {}
    body |= {"n": 2} if index % 11 == 1 else {}
    line = {"custom_id": f"id{index}", "method": "POST", "url": url, "body": {"temperature": 1.0, **body}}
    return json.dumps(line) + "\n"


def arguments(folder: Path, **changed: str) -> list[str]:
    paths = {"config": "serve.yaml", "checkpoint": "run", "input": "in.jsonl", "output": "out.jsonl", **changed}
    return [part for name, value in paths.items() for part in (f"--{name}", str(folder / value))]


def choices(path: Path) -> dict[str, list[dict]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["custom_id"] for record in records}) == len(records)
    return {record["custom_id"]: record["response"]["body"]["choices"] for record in records}


def start(root: Path, arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(root / "serve.py"), *arguments], stderr=subprocess.PIPE, text=True)


def wait_for_lines(process: subprocess.Popen, path: Path, count: int) -> None:
    deadline = time.monotonic() + 240
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def main(root: Path, monkeypatch):
    """`serve.py`'s main with a command line."""
    spec = importlib.util.spec_from_file_location("serve_script", root / "serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["serve.py", *arguments])
        return module.main()

    return run


def test_signals_lose_nothing_and_change_no_answer(root: Path, folder: Path, main) -> None:
    out = folder / "out.jsonl"
    terminated = start(root, arguments(folder))
    wait_for_lines(terminated, out, 2)
    terminated.terminate()
    assert terminated.wait(60) == 75
    first = out.read_bytes()
    assert "interrupted, a rerun resumes" in terminated.stderr.read()

    killed = start(root, arguments(folder))
    wait_for_lines(killed, out, first.count(b"\n") + 2)
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_00')

    resumed = start(root, arguments(folder))
    assert resumed.wait(240) == 0, resumed.stderr.read()
    assert main(*arguments(folder, output="uninterrupted.jsonl")) == 0
    assert out.read_bytes().startswith(first)
    assert choices(out) == choices(folder / "uninterrupted.jsonl")
    assert len(choices(out)) == 30


@pytest.mark.parametrize(
    ("changed", "extra", "message"),
    [
        ({"config": "none.yaml"}, [], "none.yaml: no such file"),
        ({}, ["slot=4"], "command line: unknown key slot; did you mean slots?"),
        ({}, ["slots=many"], "command line: slots"),
        ({}, ["slots=0"], "slots = 0: must be at least 1"),
        ({}, ["max_context=2000"], "max_context = 2000: the model's is 1024"),
        ({}, ["mesh.fsdp=2"], "mesh.fsdp = 2: serving has no use for this axis; it must be 1"),
        ({}, ["mesh.data=2"], "mesh = data 2 = 2 devices, but there are 1"),
        ({"input": "none.jsonl"}, [], "none.jsonl: cannot be read (No such file or directory)"),
        ({"input": "run"}, [], "run: cannot be read (Is a directory)"),
        ({"input": "twice.jsonl"}, [], "twice.jsonl line 2: custom_id 'id1' is already line 1's; give each its own"),
        ({"input": "/dev/null"}, [], "/dev/null: must be a regular file"),
        ({"output": "/dev/full"}, [], "/dev/full: must be a regular file"),
        ({"output": "none/out.jsonl"}, [], "none/out.jsonl: cannot be written (No such file or directory)"),
        ({"output": "in.jsonl"}, [], "in.jsonl: is the input file"),
        ({"output": "serve.yaml"}, [], "serve.yaml line 1: not the result of a batch; name another file"),
        ({"checkpoint": "none"}, [], "none"),
        ({"checkpoint": "."}, [], "say --tokenizer"),
        ({"checkpoint": "."}, ["--tokenizer", "bytes"], "holds neither"),
        ({}, ["--tokenizer", "GOLDEN"], "the tokenizer has 1792 ids, but the model 512"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(main, folder, golden, capsys, changed, extra, message) -> None:
    changed = {"output": "new.jsonl", **changed}
    extra = [str(golden / "chat" / "tokenizer") if part == "GOLDEN" else part for part in extra]
    assert main(*arguments(folder, **changed), *extra) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("serve.py: ")
    assert message in error
    assert not list(folder.glob("new.jsonl*"))


def test_a_rerun_with_another_recipe_is_refused_before_anything_is_written(main, folder, capsys, monkeypatch) -> None:
    def interrupted(batch, *arguments):
        batch_output = arguments[1]
        batch_output.write({"id": "batch_req_1", "custom_id": "id0", "response": None, "error": None})
        batch.summary.interrupted = True
        return batch.summary

    for name in ("Engine", "Scheduler"):
        monkeypatch.setattr(f"k3jax.serve.run.{name}", lambda *arguments, **options: None)
    monkeypatch.setattr("k3jax.serve.run.Batch.run", interrupted)
    assert main(*arguments(folder, output="kept.jsonl")) == 75
    kept = (folder / "kept.jsonl").read_bytes()
    capsys.readouterr()
    assert main(*arguments(folder, output="kept.jsonl"), "max_context=1023") == 2
    assert (
        "kept.jsonl: its results were made with max_context = 1024, now 1023; name another" in capsys.readouterr().err
    )
    assert (folder / "kept.jsonl").read_bytes() == kept


def test_help_says_what_a_request_and_a_result_are(main, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("custom_id", "/v1/completions", "max_tokens", "key=value", "Exit codes", "--show"):
        assert word in text


def test_serving_imports_no_training() -> None:
    code = (
        "import sys, k3jax.serve.run\n"
        "print([m for m in sys.modules if m == 'grain' or m.startswith(('k3jax.train', 'k3jax.data'))])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_example_batch_and_the_recipes_are_valid(root: Path) -> None:
    from k3jax.config import ServeRun, load_run
    from k3jax.serve.batch import check_input
    from k3jax.serve.jobs import parse_request
    from k3jax.serve.request import Limits, parse_line
    from k3jax.text import Tokenizer

    for recipe in sorted((root / "configs" / "serve").glob("*.yaml")):
        assert load_run(ServeRun, recipe).slots >= 1
    run = load_run(ServeRun, root / "configs" / "serve" / "tiny_cpu.yaml")
    limits = Limits(
        max_context=run.max_context, default_max_tokens=run.default_max_tokens, max_top_logprobs=run.max_top_logprobs
    )
    examples = sorted((root / "examples").glob("*.jsonl"))
    assert {example.name for example in examples} >= {"prompts.jsonl", "chat.jsonl"}
    for example in examples:
        check_input(example)
        for raw in example.read_bytes().splitlines():
            parse_request(parse_line(raw), tokenizer=Tokenizer.bytes(), limits=limits)
