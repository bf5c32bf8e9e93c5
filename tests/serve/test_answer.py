"""Tokens to text: stop strings, held-back text, log-probabilities."""

import itertools

import pytest

from k3jax.serve.answer import Answer, TextStream
from k3jax.serve.sampler import Sampling
from k3jax.serve.scheduler import Event, Request, TokenLogprobs
from k3jax.text import Tokenizer

TOKENIZER = Tokenizer.bytes()


def stream(text: str, stops: tuple[str, ...]) -> tuple[list[str], bool]:
    out = TextStream(TOKENIZER, stops)
    pieces = []
    for token in TOKENIZER.encode(text):
        if out.stopped:
            break
        pieces.append(out.feed(token))
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


def test_a_stop_string_is_found_inside_and_across_tokens() -> None:
    special = TOKENIZER.special_id("<|sep|>")
    assert special is not None
    for stop, expected in (("p|>", "a<|se"), ("a<|s", ""), ("|>b", "a<|sep"), ("sep", "a<|")):
        out = TextStream(TOKENIZER, (stop,))
        text = "".join(out.feed(token) for token in (97, special, 98))
        assert (text, out.stopped) == (expected, True)


def test_what_was_given_is_never_taken_back() -> None:
    stops = ("abab", "bb", "aabb")
    for letters in itertools.product("ab", repeat=7):
        text = "".join(letters)
        pieces, _ = stream(text, stops)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        cut = text[: min(ends)] if ends else text
        longest = max((stop for stop in stops if cut.endswith(stop)), key=len, default="")
        assert "".join(pieces) == cut[: len(cut) - len(longest)], text


def test_an_incomplete_code_point_at_the_end_becomes_a_replacement() -> None:
    out = TextStream(TOKENIZER)
    assert [out.feed(token) for token in "a天".encode()[:3]] == ["a", "", ""]
    assert out.finish() == "\ufffd"


def answer(
    tokens: list[int], *, stops: tuple[str, ...] = (), finish: str = "length", logprobs: int | None = 1
) -> Answer:
    request = Request(
        key="k", prompt=(1,), max_tokens=50, sampling=Sampling(), stop_ids=frozenset({257}), top_logprobs=logprobs
    )
    result = Answer(request=request, tokenizer=TOKENIZER, stream=TextStream(TOKENIZER, stops))
    for index, token in enumerate(tokens):
        if result.finish:
            break
        values = TokenLogprobs(logprob=-0.1 * index, top=((token, -0.1 * index),)) if logprobs is not None else None
        end = finish if index == len(tokens) - 1 else None
        result.feed(Event(request=request, token=token, logprobs=values, finish=end))
    return result


def test_the_end_id_is_counted_but_not_shown() -> None:
    result = answer([104, 105, 257], finish="stop")
    assert (result.text, result.finish, result.num_tokens) == ("hi", "stop", 3)
    assert result.logprobs_body()["tokens"] == ["h", "i"]


def test_a_stop_string_ends_the_answer_and_its_logprobs() -> None:
    result = answer(list(b"abXYc"), stops=("XY",))
    assert (result.text, result.finish, result.num_tokens) == ("ab", "stop", 4)
    assert result.logprobs_body() == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.0, -0.1],
        "top_logprobs": [{"a": -0.0}, {"b": -0.1}],
        "text_offset": [0, 1],
    }


def test_logprobs_spell_bytes_that_are_no_text_of_their_own() -> None:
    body = answer(list("é!".encode())).logprobs_body()
    assert body["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert body["text_offset"] == [0, 0, 1]


def test_offsets_count_text_that_is_held_back() -> None:
    result = answer(list(b"aXbc"), stops=("XY",))
    assert result.text == "aXbc"
    assert result.logprobs_body()["text_offset"] == [0, 1, 2, 3]


def test_no_logprobs_unless_asked_for() -> None:
    assert answer([97], logprobs=None).logprobs_body() is None
