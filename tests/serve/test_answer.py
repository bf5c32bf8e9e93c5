"""Tokens to choices: stop strings, held-back text, log-probabilities, messages of chats."""

import itertools
import json

import pytest

from k3jax.serve.answer import ChatAnswer, StopStrings, TextAnswer
from k3jax.serve.sampler import Sampling
from k3jax.serve.scheduler import Event, Request, TokenLogprobs
from k3jax.text import Tokenizer

TOKENIZER = Tokenizer.bytes()


def stream(text: str, stops: tuple[str, ...]) -> tuple[list[str], bool]:
    out = StopStrings(stops)
    pieces = []
    for character in text:
        if out.stopped:
            break
        pieces.append(out.feed(character))
    return [*pieces, out.finish()], out.stopped


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("hello\ndef f", ("\ndef ",), "hello"),
        ("hello\ndeg f", ("\ndef ",), "hello\ndeg f"),
        ("aaab", ("aab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("stop", ("stop",), ""),
        ("xyz", (), "xyz"),
        ("x天气y", ("气",), "x天"),
        ("one two", ("two", "wo"), "one "),  # both complete with the same character: the longer one counts
        ("abcd", ("abcd", "c"), "ab"),  # the one that completes first counts
        ("almost sto", ("stop",), "almost sto"),
        ("a<|sep|>b", ("<|sep|>",), "a"),
    ],
)
def test_text_ends_before_the_stop_string_that_completes_first(
    text: str, stops: tuple[str, ...], expected: str
) -> None:
    pieces, stopped = stream(text, stops)
    assert "".join(pieces) == expected
    assert stopped == (expected != text)


@pytest.mark.parametrize(("stop", "expected"), [("p|>", "a<|se"), ("a<|s", ""), ("|>b", "a<|sep"), ("sep", "a<|")])
def test_a_stop_string_is_found_inside_and_across_tokens(stop: str, expected: str) -> None:
    result = answer([97, TOKENIZER.special_id("<|sep|>"), 98], stops=(stop,))
    assert (result.text, result.finish) == (expected, "stop")


def test_what_was_given_is_never_taken_back() -> None:
    stops = ("abab", "bb", "aabb")
    for letters in itertools.product("ab", repeat=7):
        text = "".join(letters)
        pieces, _ = stream(text, stops)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        cut = text[: min(ends)] if ends else text
        longest = max((stop for stop in stops if cut.endswith(stop)), key=len, default="")
        assert "".join(pieces) == cut[: len(cut) - len(longest)], text


def request(logprobs: int | None, **sampling) -> Request:
    stop_ids = TOKENIZER.stop_ids
    return Request(
        key="0/k", prompt=(1,), max_tokens=50, sampling=Sampling(**sampling), stop_ids=stop_ids, top_logprobs=logprobs
    )


def fed(result, tokens: list[int], finish: str):
    """`result` after one event per token, the last with `finish`, until it is complete."""
    wants = result.request.top_logprobs is not None
    for index, token in enumerate(tokens):
        if result.finish:
            break
        values = TokenLogprobs(logprob=-0.1 * index, top=((token, -0.1 * index),)) if wants else None
        end = finish if index == len(tokens) - 1 else None
        result.feed(Event(request=result.request, token=token, logprobs=values, finish=end))
    return result


def answer(
    tokens: list[int], *, stops: tuple[str, ...] = (), finish: str = "length", logprobs: int | None = 1
) -> TextAnswer:
    return fed(TextAnswer(request(logprobs), TOKENIZER, stops), tokens, finish)


def test_an_incomplete_code_point_at_the_end_becomes_a_replacement() -> None:
    assert answer(list("a天".encode()[:3])).text == "a\ufffd"


def test_the_end_id_is_counted_but_not_shown() -> None:
    result = answer([104, 105, 257], finish="stop")
    assert (result.text, result.finish, result.num_tokens) == ("hi", "stop", 3)
    assert result.choice()["logprobs"]["tokens"] == ["h", "i"]


def test_a_stop_string_ends_the_answer_and_its_logprobs() -> None:
    result = answer(list(b"abXYc"), stops=("XY",))
    assert (result.text, result.finish, result.num_tokens) == ("ab", "stop", 4)
    assert result.choice()["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.0, -0.1],
        "top_logprobs": [{"a": -0.0}, {"b": -0.1}],
        "text_offset": [0, 1],
    }


def test_logprobs_spell_bytes_that_are_no_text_of_their_own() -> None:
    body = answer(list("é!".encode())).choice()["logprobs"]
    assert body["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert body["text_offset"] == [0, 0, 1]


def test_offsets_count_text_that_is_held_back() -> None:
    result = answer(list(b"aXbc"), stops=("XY",))
    assert result.text == "aXbc"
    assert result.choice()["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_no_logprobs_unless_asked_for() -> None:
    assert answer([97], logprobs=None).choice()["logprobs"] is None


def chat(
    text: str, *, thinking: bool = False, stops: tuple[str, ...] = (), finish: str = "stop", logprobs: int | None = None
) -> ChatAnswer:
    result = ChatAnswer(request(logprobs, choice=1, seed=5), TOKENIZER, stops, thinking=thinking)
    return fed(result, TOKENIZER.encode(text, specials=True), finish)


WHOLE = (
    "why<|close|>think<|sep|><|open|>response<|sep|>So 天.<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="城" type="number"<|sep|>1<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


def test_a_chat_answer_is_openais_message() -> None:
    result = chat(WHOLE, thinking=True)
    choice = result.choice()
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (1, "tool_calls", None)
    message = choice["message"]
    (call,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "So 天.", "reasoning_content": "why"}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"城": 1}'}}
    assert result.num_tokens == len(TOKENIZER.encode(WHOLE, specials=True))
    assert result.num_reasoning == len(b"why") + 1 + len(b"think") + 1


def test_call_ids_are_the_same_in_a_rerun_and_differ_within_an_answer() -> None:
    two = "<|open|>tools<|sep|>" + '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>' * 2
    ids = [[call["id"] for call in chat(two).choice()["message"]["tool_calls"]] for _ in range(2)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


@pytest.mark.parametrize(
    ("text", "thinking", "finish", "message", "reason"),
    [
        ("count the", True, "length", {"content": None, "reasoning_content": "count the"}, "length"),
        ("count<|close|>", True, "length", {"content": None, "reasoning_content": "count"}, "length"),
        ("ok<|close|>message<|sep|>", False, "stop", {"content": "ok", "reasoning_content": None}, "stop"),
        ("<|end_of_msg|>", False, "stop", {"content": "", "reasoning_content": None}, "stop"),
        ("r<|open|>response<|sep|>", True, "length", {"content": "", "reasoning_content": "r"}, "length"),
    ],
)
def test_messages_of_cut_and_irregular_completions(text, thinking, finish, message, reason) -> None:
    choice = chat(text, thinking=thinking, finish=finish).choice()
    assert choice["message"] == {"role": "assistant", **message}
    assert choice["finish_reason"] == reason


def test_arguments_that_are_no_json_stay_text() -> None:
    text = (
        '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>json<|sep|>{"a<|close|>json<|sep|><|close|>call<|sep|>'
    )
    (call,) = chat(text).choice()["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a'


@pytest.mark.parametrize(
    ("text", "thinking", "content", "reasoning"),
    [
        ("one STOP two", False, "one ", None),
        ("r STOP<|close|>think<|sep|><|open|>response<|sep|>c", True, None, "r "),
        ("r ST<|close|>think<|sep|><|open|>response<|sep|>OP c STOP", True, "OP c ", "r ST"),
        ("STOP", False, "", None),
        ("a ST<|close|>response<|sep|>OP", False, "a ST", None),
    ],
)
def test_a_stop_string_ends_the_channel_that_it_is_in(text, thinking, content, reasoning) -> None:
    choice = chat(text, thinking=thinking, stops=("STOP",), finish="length").choice()
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (content, reasoning)
    assert choice["finish_reason"] == ("stop" if "STOP" in text else "length")


def test_a_stop_string_in_arguments_ends_nothing() -> None:
    choice = chat(WHOLE, thinking=True, stops=("argument", "tool", "1")).choice()
    assert choice["finish_reason"] == "tool_calls"


def test_chat_logprobs_have_one_entry_for_every_token() -> None:
    result = chat("é<|close|>response<|sep|>", logprobs=1)
    entries = result.choice()["logprobs"]["content"]
    assert len(entries) == result.num_tokens == 2 + 1 + len("response") + 1
    assert entries[0] == {
        "token": "bytes:\\xc3",
        "logprob": -0.0,
        "bytes": [0xC3],
        "top_logprobs": [{"token": "bytes:\\xc3", "logprob": -0.0, "bytes": [0xC3]}],
    }
    assert entries[2]["token"] == "<|close|>"


def test_no_token_sequence_fails_to_give_a_message() -> None:
    for seed in range(200):
        tokens = [(seed * 7919 + place * place * 31) % 512 for place in range(40)]
        result = ChatAnswer(request(1), TOKENIZER, (), thinking=seed % 2 == 0)
        choice = fed(result, tokens, "length").choice()
        assert choice["finish_reason"] in ("stop", "length", "tool_calls")
        json.dumps(choice, allow_nan=False)


def streamed(result, tokens: list[int], finish: str) -> list[dict]:
    """The deltas of `result`, asked for after every token."""
    deltas = []
    for index, token in enumerate(tokens):
        if result.finish:
            break
        values = TokenLogprobs(logprob=-0.1 * index, top=((token, -0.1 * index),))
        end = finish if index == len(tokens) - 1 else None
        result.feed(Event(request=result.request, token=token, logprobs=values, finish=end))
        delta = result.delta()
        deltas += [delta] if delta else []
    return deltas


@pytest.mark.parametrize("stops", [(), ("ab", "b <"), ("e",)])
@pytest.mark.parametrize("thinking", [True, False])
def test_a_stream_put_together_is_the_choice(stops: tuple[str, ...], thinking: bool) -> None:
    hostile = ["é ab", "ok<|close|>message<|sep|>", "r<|open|>tools<|sep|><|open|>call tool=", "<|end_of_msg|>"]
    for text in (WHOLE, WHOLE * 2, *hostile, *(WHOLE[:cut] for cut in range(20, 200, 30))):
        result = ChatAnswer(request(1), TOKENIZER, stops, thinking=thinking)
        deltas = streamed(result, TOKENIZER.encode(text, specials=True), "length")
        choice = result.choice()
        message = {"role": "assistant", "content": None, "reasoning_content": None}
        for delta in deltas:
            for name, value in delta["delta"].items():
                message[name] = value if message.get(name) is None else message[name] + value
        calls = choice["message"].get("tool_calls", [])
        assert message == choice["message"] | (
            {"tool_calls": [{"index": i} | call for i, call in enumerate(calls)]} if calls else {}
        )
        assert [entry for d in deltas for entry in d["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + [choice["finish_reason"]]


@pytest.mark.parametrize("stops", [(), ("ab", "b c"), ("é",)])
def test_a_stream_of_text_put_together_is_the_choice(stops: tuple[str, ...]) -> None:
    for text in (b"xaabyab c", "a é ab".encode(), b"\xc3", b"ab", "天气 b b c".encode()):
        result = TextAnswer(request(1), TOKENIZER, stops)
        deltas, choice = streamed(result, list(text), "length"), result.choice()
        assert "".join(delta["text"] for delta in deltas) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for delta in deltas for value in delta["logprobs"][name]] == values
        assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + [choice["finish_reason"]]
