"""Completions to messages: the golden parses, whole and in pieces, as text and as ids; fuzzing; linear time."""

import hashlib
import json
import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from k3jax.text import CompletionParser, ParsedCompletion, Tokenizer, parse_completion, render_chat

BYTES = Tokenizer.bytes()
CALL = '<|open|>call tool="f" index="1"<|sep|>'
END_CALL = "<|close|>call<|sep|>"
TOOLS = "<|open|>tools<|sep|>"


def parse(text: str, *, thinking: bool = False, finish: str = "stop") -> ParsedCompletion:
    return parse_completion(text, tokenizer=BYTES, thinking=thinking, finish=finish)


def calls(body: str) -> list[tuple[str, object]]:
    return [(call["name"], call["arguments"]) for call in parse(TOOLS + body).tool_calls]


def argument(key: str, value: str, kind: str = "number") -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def in_pieces(completion, sizes: Callable[[], int], tokenizer: Tokenizer, *, thinking: bool, finish: str):
    """The result of feeding pieces; checks on the way that nothing given is taken back."""
    parser = CompletionParser(tokenizer=tokenizer, thinking=thinking)
    reasoning, content, tool_calls, position = "", "", [], 0
    while position < len(completion):
        size = sizes()
        parser.feed(completion[position : position + size])
        position += size
        delta = parser.take()
        reasoning, content = reasoning + delta.reasoning, content + delta.content
        tool_calls += delta.tool_calls
    parsed = parser.finish(finish)
    rest = parser.take()
    assert reasoning + rest.reasoning == (parsed.reasoning or "")
    assert content + rest.content == (parsed.content or "")
    assert [call.name for call in (*tool_calls, *rest.tool_calls)] == [call["name"] for call in parsed.tool_calls]
    return parsed


def forms(given: dict) -> list:
    joined = ["".join(string * count for string, count in given["recipe"])] if "recipe" in given else []
    joined += ["".join(given["chunks"])] if "chunks" in given else []
    return [*joined, *(given[name] for name in ("text", "ids") if name in given)]


def agrees(parsed: ParsedCompletion, expected: dict, *, strict: bool) -> bool:
    if "error" in expected:
        return False
    for name in ("reasoning", "content"):
        found, wanted = getattr(parsed, name), expected[name]
        if isinstance(wanted, dict):
            assert found is not None
            digest = hashlib.sha256(found.encode()).hexdigest()
            found, wanted = {"length": len(found), "sha256": digest}, wanted
        if (found or "") != (wanted or "") or (strict and name == "content" and found is not None):
            return False
    found_calls = parsed.tool_calls
    wanted_calls = expected["tool_calls"]
    if isinstance(wanted_calls, dict):
        ends = {"count": len(found_calls), "first": found_calls[0], "last": found_calls[-1]}
        found_calls, wanted_calls = [ends], [wanted_calls]
    same = json.dumps(found_calls, sort_keys=True) == json.dumps(wanted_calls, sort_keys=True)  # 1 is not 1.0
    return same and parsed.finish_reason == expected["finish_reason"]


def test_golden_completions_whole_and_in_pieces(tokenizer: Tokenizer, chat_cases: Callable) -> None:
    random_sizes = random.Random(0)
    for case in chat_cases("completion_parse"):
        given = case["input"]
        options = {"thinking": given["start"] == "think", "finish": given["finish"]}
        for completion in forms(given):
            parsed = parse_completion(completion, tokenizer=tokenizer, **options)
            accepted = [case["expected"], *case.get("also_accept", [])]
            strict = case.get("content_null_strict", False)
            assert any(agrees(parsed, expected, strict=strict) for expected in accepted), (case["id"], parsed)
            for sizes in (lambda: 1, lambda: 7, lambda: random_sizes.randint(1, 40)):
                assert in_pieces(completion, sizes, tokenizer, **options) == parsed, case["id"]


ARGUMENTS = {"s": "x<|close|>argument<|sep|>y", "n": 1, "f": 1.5, "b": True, "z": None, "o": {"k": [1, "é"]}, "e": ""}


@pytest.mark.parametrize("hostile", ["", "<|close|>think<|sep|>", "<|open|>tools<|sep|>[EOS]", '<|end_of_msg|>"&amp;'])
def test_what_a_message_renders_to_parses_back_from_ids(tokenizer: Tokenizer, hostile: str) -> None:
    message = {
        "role": "assistant",
        "reasoning_content": f"why {hostile}天",
        "content": f"{hostile} because\n",
        "tool_calls": [
            {"function": {"name": f"t{hostile}", "arguments": {**ARGUMENTS, f"k{hostile}": hostile}}},
            {"function": {"name": "g", "arguments": '{"broken": '}},
        ],
    }
    user = {"role": "user", "content": "q"}
    prompt = render_chat([user], tokenizer=tokenizer).ids
    whole = render_chat([user, message], tokenizer=tokenizer, add_generation_prompt=False).ids
    parsed = parse_completion(whole[len(prompt) :], tokenizer=tokenizer)
    assert whole[: len(prompt)] == prompt
    assert (parsed.reasoning, parsed.content) == (message["reasoning_content"], message["content"])
    assert [(call["name"], call["arguments"]) for call in parsed.tool_calls] == [
        (f"t{hostile}", {**ARGUMENTS, f"k{hostile}": hostile}),
        ("g", '{"broken": '),
    ]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (CALL + argument("a", "1") + END_CALL, [("f", {"a": 1})]),
        (f" {CALL} x {argument('a', '1')} y {END_CALL} z ", [("f", {"a": 1})]),  # text between blocks means nothing
        (CALL + CALL + argument("a", "1") + END_CALL, [("f", {"a": 1})]),
        (CALL + '<|open|>argument key="a"<|sep|>1' + argument("b", "2") + END_CALL, [("f", {"b": 2})]),
        (CALL + '<|open|>argument key="a"<|sep|>1<|close|>tools<|sep|>' + END_CALL, []),
        (CALL + '<|open|>argument key="a"<|sep|>1<|end_of_msg|>' + END_CALL, []),
        (CALL + '<|open|>argument type="number"<|sep|>1<|close|>argument<|sep|>' + END_CALL, [("f", {})]),
        (CALL + argument("a", "NaN") + argument("b", "-Infinity") + END_CALL, [("f", {"a": "NaN", "b": "-Infinity"})]),
        (CALL + argument("a", "1e999") + END_CALL, [("f", {"a": "1e999"})]),
        (CALL + argument("a", "9" * 5000) + END_CALL, [("f", {"a": "9" * 5000})]),
        (CALL + argument("a", "[" * 9999, "array") + END_CALL, [("f", {"a": "[" * 9999})]),
        (CALL + argument("a", "[" * 999 + "]" * 999) + END_CALL, [("f", {"a": "[" * 999 + "]" * 999})]),
        (CALL + argument("a", "x <|sep|> <|open|> y <|close|> z", "string") + END_CALL,
         [("f", {"a": "x <|sep|> <|open|> y <|close|> z"})]),
        (CALL + argument("a", "<|open|>response<|sep|>", "string") + END_CALL,
         [("f", {"a": "<|open|>response<|sep|>"})]),
        (CALL + argument("a", "<|close|>json<|sep|>", "string") + END_CALL, [("f", {"a": "<|close|>json<|sep|>"})]),
        (CALL + '<|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>' + END_CALL, [("f", {"a": 1})]),
        (CALL + '<|open|>json type="object"<|sep|>{"a": <|close|>json<|sep|>' + END_CALL, [("f", '{"a": ')]),
        (CALL + '<|open|>json type="object"<|sep|>"text"<|close|>json<|sep|>' + END_CALL, []),
        (CALL + "<|open|>json<|sep|>{}<|close|>json<|sep|>" + argument("a", "1") + END_CALL, [("f", {"a": 1})]),
        (CALL + "<|open|>json<|sep|>{}<|close|>json<|sep|>and more" + END_CALL, [("f", {})]),
        ('<|open|>call tool="城市" <|sep|>' + argument("城", "北", "string") + END_CALL, [("城市", {"城": "北"})]),
        (argument("a", "1") + END_CALL + CALL + END_CALL, [("f", {})]),
        ('<|open|>call-no tool="g"<|sep|>' + END_CALL + "<|open|><|sep|>" + CALL + END_CALL, [("f", {})]),
    ],
)  # fmt: skip
def test_calls(body: str, expected: list) -> None:
    assert calls(body) == expected


@pytest.mark.parametrize(
    ("text", "thinking", "finish", "expected"),
    [
        ("a<|open|>response<|sep|>b", False, "stop", (None, "a<|open|>response<|sep|>b")),
        ("<|open|>think<|sep|><|open|>think<|sep|>r", True, "stop", ("<|open|>think<|sep|>r", None)),
        ("r<|close|>thin", True, "stop", ("r<|close|>thin", None)),
        ("r<|close|>thin", True, "length", ("r", None)),
        ("<|open|>thi", True, "length", ("", None)),
        ("<|open|>thi", True, "stop", ("<|open|>thi", None)),
        ("a<|end_of_m", False, "length", (None, "a")),
        ("<think>r</think>", True, "stop", ("<think>r</think>", None)),
        ("r<|close|>think<|sep|>lost<|open|>response<|sep|>c", True, "stop", ("r", "c")),
        ("r<|close|>think<|sep|><|close|>message<|sep|><|open|>response<|sep|>c", True, "stop", ("r", None)),
        (f"{TOOLS}<|open|>response<|sep|>c", False, "stop", (None, "c")),
        (f"c{TOOLS}{CALL}{END_CALL}", False, "length", (None, "c")),
        (f"{TOOLS}{CALL}{END_CALL}", False, "stop", (None, None)),
        ("", True, "length", ("", None)),
    ],
)
def test_channels(text: str, thinking: bool, finish: str, expected: tuple) -> None:
    parsed = parse(text, thinking=thinking, finish=finish)
    assert (parsed.reasoning, parsed.content) == expected
    assert (parsed.finish_reason == "tool_calls") == bool(parsed.tool_calls)


@pytest.mark.parametrize("end", ["[EOS]", "<|end_of_msg|>"])
def test_both_end_ids_end_a_channel(end: str) -> None:
    ids = [*BYTES.encode("ok"), BYTES.special_id(end), *BYTES.encode("not this")]
    for completion in (ids, np.asarray(ids, np.int32)):
        assert parse_completion(completion, tokenizer=BYTES, thinking=False).content == "ok"


def test_decoding_puts_nothing_between_markers(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.special_id("<|close|>"), *tokenizer.encode("think"), tokenizer.special_id("<|sep|>")]
    assert tokenizer.decode(ids) == "<|close|>think<|sep|>"


def test_a_completion_is_all_text_or_all_ids() -> None:
    parser = CompletionParser(tokenizer=BYTES)
    parser.feed("a")
    with pytest.raises(TypeError, match="all text or all ids"):
        parser.feed([98])


def test_the_parser_says_whether_it_is_in_the_reasoning() -> None:
    parser = CompletionParser(tokenizer=BYTES)
    seen = []
    for piece in ("", "r", "<|close|>think", "<|sep|>", "<|open|>response<|sep|>", "c"):
        parser.feed(piece)
        seen.append(parser.in_reasoning)
    assert seen == [True, True, True, False, False, False]
    assert not CompletionParser(tokenizer=BYTES, thinking=False).in_reasoning


PIECES = [
    "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|open|>think<|sep|>", "<|close|>think<|sep|>", TOOLS, CALL,
    "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>tools<|sep|>", "<|close|>message<|sep|>", END_CALL,
    '<|open|>argument key="a&quot;" type="number"<|sep|>', "<|close|>argument<|sep|>", "<|close|>json<|sep|>",
    '<|open|>json type="object"<|sep|>', "think", "response", "tools", "call", ' tool="g"', " key=", '"', "{", "}",
    "[1", "]", "1.0", "<", "<|", "|>", "sep|>", "天", "🎉", "é", "\ud800", "\x00", " ", "\n", "text", "&amp;", "[EOS]",
]  # fmt: skip


@pytest.mark.parametrize("seconds", [3, pytest.param(600, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_fuzzed_completions(tokenizer: Tokenizer, seconds: int) -> None:
    rng, deadline, count = random.Random(0), time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        weights = [rng.random() ** 4 for _ in PIECES]
        text = "".join(rng.choices(PIECES, weights, k=rng.randint(0, 60)))
        options = {"thinking": rng.random() < 0.5, "finish": rng.choice(["stop", "length"])}
        ids = tokenizer.encode(text) if rng.random() < 0.2 else tokenizer.encode(text, specials=True)
        if rng.random() < 0.2:
            ids = [rng.randrange(tokenizer.vocab_size) if rng.random() < 0.3 else token for token in ids]
        for completion in (text, ids):
            parsed = parse_completion(completion, tokenizer=tokenizer, **options)
            for sizes in (lambda: 1, lambda: rng.randint(1, 9)):
                assert in_pieces(completion, sizes, tokenizer, **options) == parsed, (completion, options)
            json.dumps(parsed.tool_calls, allow_nan=False)
        if options["finish"] == "stop" and "[EOS]" not in text and "\ud800" not in text:
            from_ids = parse_completion(tokenizer.encode(text, specials=True), tokenizer=tokenizer, **options)
            assert from_ids == parse_completion(text, tokenizer=tokenizer, **options), text
        count += 1
    assert count > 50


def cost(text: str, repeats: int) -> float:
    """Seconds of processor time, the least of several runs: the machine's load does not count."""
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        parse(text)
        times.append(time.thread_time() - begin)
    return min(times)


UNITS = [CALL, '<|open|>argument key="a"<|sep|>', "<|open|>", "<|open|>call ", "<", "<|close|>thin", "a=", '"', "[{"]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "start", ["", TOOLS, TOOLS + CALL, f"{TOOLS}{CALL}<|open|>json<|sep|>", f"{TOOLS}<|open|>call "]
)
def test_time_is_linear_in_what_is_never_closed(start: str, unit: str) -> None:
    end = f"<|close|>json<|sep|>{END_CALL}"
    assert cost(start + unit * 6000 + end, 3) < 16 * cost(start + unit * 600 + end, 5) + 1e-3


def test_600_unclosed_openers_cost_at_most_12_times_60() -> None:
    assert cost(TOOLS + CALL * 600, 20) < 12 * cost(TOOLS + CALL * 60, 20)
