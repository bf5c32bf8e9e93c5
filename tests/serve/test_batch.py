"""A batch file against an engine that answers from a table: results, bad lines, resume, interruption."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from k3jax.config import ConfigError
from k3jax.serve.batch import Batch, Summary, check_input, make_progress, show
from k3jax.serve.jobs import Jobs
from k3jax.serve.request import Limits
from k3jax.serve.results import OutputFile
from k3jax.serve.scheduler import Scheduler
from k3jax.text import Tokenizer


def line(custom_id: str, prompt: object, **body: object) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}
    return json.dumps(request)


def chat(custom_id: str, content: str, **body: object) -> str:
    request = {"messages": [{"role": "user", "content": content}], "reasoning_effort": "none", **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": request})


ASKED = re.compile(rb'role="user"<\|sep\|>(.*?)<\|close\|>', re.DOTALL)


def reply(prompt: bytes) -> bytes | None:
    asked = ASKED.search(prompt)
    prompt = asked.group(1) if asked else prompt
    return None if prompt == b"nan" else prompt.upper() + b"!"


@pytest.fixture
def serve(table_engine, tmp_path: Path) -> Callable[..., Summary]:
    def run(lines: list[str | bytes], *, stop_after: int | None = None, max_context: int = 64) -> Summary:
        (tmp_path / "in.jsonl").write_bytes(
            b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines)
        )
        path = tmp_path / "out.jsonl"
        stopping = (lambda: path.read_bytes().count(b"\n") >= stop_after) if stop_after is not None else (lambda: False)
        check_input(tmp_path / "in.jsonl")
        with OutputFile(path) as output, make_progress(Console(file=io.StringIO())) as progress:
            jobs = Jobs(
                scheduler=Scheduler(table_engine(reply)),
                tokenizer=Tokenizer.bytes(),
                limits=Limits(max_context=max_context, default_max_tokens=8, max_top_logprobs=2, score_prompts=True),
                model_name="tiny",
            )
            return Batch(jobs=jobs, stopping=stopping).run(tmp_path / "in.jsonl", output, progress)

    return run


@pytest.fixture
def records(tmp_path: Path) -> Callable[[], list[dict]]:
    return lambda: [json.loads(x) for x in (tmp_path / "out.jsonl").read_text().splitlines()]


def texts(records: list[dict]) -> dict[str, str]:
    return {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records if r["error"] is None}


def test_a_result_is_openais_batch_form(serve, records) -> None:
    assert str(serve([line("a", "hey", max_tokens=9, logprobs=1, temperature=0, seed=5)])) == "1 completed, 0 failed"
    (record,) = records()
    assert set(record) == {"id", "custom_id", "response", "error"}
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 200)
    assert record["id"].startswith("batch_req_")
    body = record["response"]["body"]
    assert (body["object"], body["model"], body["seed"]) == ("text_completion", "tiny", 5)
    cached = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, **cached}
    (choice,) = body["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "HEY!", "stop")
    assert choice["logprobs"]["tokens"] == ["H", "E", "Y", "!"]


def test_finish_reasons(serve, records) -> None:
    serve([line("length", "hello", max_tokens=2), line("end", "hi"), line("text", "abcdef", stop="CD")])
    reasons = {r["custom_id"]: r["response"]["body"]["choices"][0]["finish_reason"] for r in records()}
    assert reasons == {"length": "length", "end": "stop", "text": "stop"}
    assert texts(records()) == {"length": "HE", "end": "HI!", "text": "AB"}


def test_a_byte_order_mark_and_blank_lines_are_no_requests(serve, records) -> None:
    assert serve([b"\xef\xbb\xbf" + line("a", "x").encode(), "", "  ", line("b", "y")]).completed == 2
    assert texts(records()) == {"a": "X!", "b": "Y!"}


BAD_LINES = [
    ("{oops", None, "invalid_json_line", 2),
    (line("", "x"), None, "missing_custom_id", 2),
    (json.dumps({"url": "/v1/completions"}), None, "missing_custom_id", 2),
    (line("bad", "x").replace("completions", "nope"), "bad", "unsupported_url", None),
    (line("bad", "x", stream=True), "bad", "unsupported", None),
    (line("bad", "x").replace("completions", "chat/completions"), "bad", "invalid_request", None),
    (chat("bad", "x" * 70), "bad", "context_length_exceeded", None),
    (line("bad", "x" * 70), "bad", "context_length_exceeded", None),
    (line("bad", "x", best_of=2), "bad", "unsupported", None),
    (line("bad", "x", temperature=9), "bad", "invalid_request", None),
    (line("bad", "nan"), "bad", "non_finite_logits", None),
    (line("bad", "nan", n=3), "bad", "non_finite_logits", None),
]


@pytest.mark.parametrize(("bad", "custom_id", "code", "number"), BAD_LINES)
def test_a_bad_line_gets_one_error_record_and_the_batch_goes_on(serve, records, bad, custom_id, code, number) -> None:
    lines = [line("good0", "a"), bad, line("good1", "b")]
    for _ in range(2):  # the second run must neither lose nor repeat a record
        summary = serve(lines)
        assert texts(records()) == {"good0": "A!", "good1": "B!"}
        (failed,) = [r for r in records() if r["error"]]
        assert (failed["custom_id"], failed["error"]["code"]) == (custom_id, code)
        assert failed["error"].get("line") == number
        if number is None:
            assert failed["response"]["status_code"] in (400, 500)
            assert failed["response"]["body"]["error"]["message"] == failed["error"]["message"]
        else:
            assert failed["response"] is None
            assert failed["error"]["message"].startswith(f"line {number}: ")
    assert (summary.completed, summary.failed, summary.skipped) == (0, 0, 3)


def test_a_custom_id_that_comes_twice_is_refused_up_front(serve, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"in.jsonl line 3: custom_id 'a' is already line 1's; give each its own"):
        serve([line("a", "x"), "{oops", line("a", "y")])
    assert not (tmp_path / "out.jsonl").exists()


def test_a_chat_result_is_openais_batch_form(serve, records) -> None:
    serve([chat("a", "hey", max_completion_tokens=9, logprobs=True, top_logprobs=1, seed=5)], max_context=400)
    (record,) = records()
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 200)
    body = record["response"]["body"]
    assert (body["object"], body["model"], body["seed"]) == ("chat.completion", "tiny", 5)
    assert body["id"].startswith("chatcmpl-")
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "HEY!", "reasoning_content": None}
    assert choice["finish_reason"] == "stop"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["H", "E", "Y", "!", "[EOS]"]


@pytest.mark.parametrize("make", [line, chat])
def test_a_line_of_several_choices_has_one_record(serve, records, make) -> None:
    serve([make("a", "one", n=5, max_tokens=9), make("b", "two", max_tokens=9)], max_context=400)
    by_id = {record["custom_id"]: record["response"]["body"] for record in records()}
    assert [choice["index"] for choice in by_id["a"]["choices"]] == [0, 1, 2, 3, 4]
    texts = [choice["text"] if make is line else choice["message"]["content"] for choice in by_id["a"]["choices"]]
    assert texts == ["ONE!"] * 5
    assert by_id["a"]["usage"]["completion_tokens"] == 5 * by_id["b"]["usage"]["completion_tokens"]
    assert len(by_id) == 2


def test_echo_puts_the_prompt_before_the_text(serve, records) -> None:
    asked = {
        "text": {"max_tokens": 2},
        "scored": {"max_tokens": 1, "logprobs": 1},
        "only": {"max_tokens": 0, "logprobs": 1},
    }
    serve([line(custom_id, "hey you", echo=True, **body) for custom_id, body in asked.items()])
    assert texts(records()) == {"text": "hey youHE", "scored": "hey youH", "only": "hey you"}
    bodies = {record["custom_id"]: record["response"]["body"] for record in records()}
    assert bodies["text"]["choices"][0]["logprobs"] is None
    found = bodies["scored"]["choices"][0]["logprobs"]
    assert found["tokens"] == [*"hey you", "H"]
    assert found["token_logprobs"] == [None, *[-0.25] * 6, -0.5]
    assert found["top_logprobs"] == [None, *[{"A": -0.25}] * 6, {"H": -0.5}]
    assert found["text_offset"] == list(range(8))
    assert bodies["only"]["choices"][0]["logprobs"]["token_logprobs"] == [None, *[-0.25] * 6]
    generated = {custom_id: body["usage"]["completion_tokens"] for custom_id, body in bodies.items()}
    assert generated == {"text": 2, "scored": 1, "only": 0}


def test_a_line_repaired_after_a_run_is_served_by_the_next(serve, records) -> None:
    serve([line("a", "x"), "{oops"])
    serve([line("a", "x"), line("b", "y")])
    assert texts(records()) == {"a": "X!", "b": "Y!"}


MANY = [line(f"id{i}", f"prompt {i}", max_tokens=3 + i % 20) for i in range(40)]


@pytest.mark.parametrize("stop_after", [0, 1, 17, 30])
@pytest.mark.parametrize(
    "torn", [b"", b'{"id": "batch_req_12', b"{", b'{"id": "batch_req_1", "custom_id": "id39", "resp']
)
def test_an_interrupted_batch_resumes_without_loss_or_repetition(serve, records, tmp_path, stop_after, torn) -> None:
    summary = serve(MANY, stop_after=stop_after)
    assert summary.interrupted
    out = tmp_path / "out.jsonl"
    kept = out.read_bytes() if out.exists() else b""
    out.write_bytes(kept + torn)
    assert not serve(MANY).interrupted
    assert out.read_bytes().startswith(kept)
    assert sorted(r["custom_id"] for r in records()) == sorted(f"id{i}" for i in range(40))
    assert texts(records()) == {f"id{i}": f"PROMPT {i}!"[: 3 + i % 20] for i in range(40)}


def test_a_signal_also_ends_a_run_of_bad_lines(serve, records) -> None:
    assert serve(["{"] * 50, stop_after=3).interrupted
    assert len(records()) == 3
    assert serve(["{"] * 50).failed == 47


@pytest.mark.parametrize(
    "content", [b"notes\n", b'{"custom_id": "a"}\n', b"notes without an end", b'{"id": "batch_req_x"\n']
)
def test_a_file_that_is_no_result_is_left_alone(tmp_path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"notes.txt line 1: not the result of a batch; name another file"):
        OutputFile(path)
    assert path.read_bytes() == content


def test_of_two_runs_that_begin_together_the_second_leaves_the_firsts_output(tmp_path, monkeypatch) -> None:
    path = tmp_path / "out.jsonl"
    with OutputFile(path):
        monkeypatch.setattr(Path, "exists", lambda self: False)  # as the second saw it
        with pytest.raises(ConfigError, match="another process is writing it"):
            OutputFile(path)
        assert path.is_file()


def test_two_runs_cannot_write_one_output(tmp_path) -> None:
    with OutputFile(tmp_path / "out.jsonl"), pytest.raises(ConfigError, match="another process is writing it"):
        OutputFile(tmp_path / "out.jsonl")


def test_an_output_that_got_no_record_is_not_left_behind(tmp_path) -> None:
    with OutputFile(tmp_path / "out.jsonl"):
        pass
    assert not (tmp_path / "out.jsonl").exists()


def test_show_prints_prompts_with_completions_in_input_order(serve, tmp_path) -> None:
    lines = [line("b", "second [bold]", max_tokens=20), "{oops", line("a", list(b"first")), line("c", "x", best_of=3)]
    serve([*lines, chat("d", "asked", max_tokens=9)], max_context=400)
    console = Console(file=io.StringIO(), width=100)
    show(tmp_path / "in.jsonl", tmp_path / "out.jsonl", console, tokenizer=Tokenizer.bytes())
    text = console.file.getvalue()
    assert "second [bold]SECOND [BOLD]!" in text
    assert text.index("second") < text.index("firstFIRST!") < text.index("best_of = 3 is not supported")
    assert "user: asked\nASKED!" in text
