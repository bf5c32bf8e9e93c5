"""Batches: an order that does not depend on hosts or threads, and a position that survives the process."""

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from k3jax.config import ConfigError, DataConfig
from k3jax.data import BatchIterator, join_positions, load_corpus
from k3jax.text import Tokenizer

FILES, ROWS = 40, 4


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Files whose every line says which file and line it is."""
    folder = tmp_path_factory.mktemp("corpus")
    for n in range(FILES):
        (folder / f"{n:02}.txt").write_text("".join(f"{n:02}{line:03} " for line in range(3 + 2 * n)))
    return folder


def config(source, **options) -> DataConfig:
    return DataConfig(**{"source": str(source), "seq_len": 12, "batch_size": ROWS, "eval_fraction": 0.2} | options)


def batches(source, *, rows=None, **options) -> BatchIterator:
    data = config(source, **options)
    return BatchIterator(load_corpus(data, Tokenizer.bytes()).train, data, rows=rows)


def hosts_of(source, count) -> list[BatchIterator]:
    """One iterator a host, each with an equal share of the rows."""
    share = ROWS // count
    return [batches(source, rows=range(host * share, (host + 1) * share)) for host in range(count)]


def take(iterators, count) -> np.ndarray:
    """`count` whole batches [count, rows, 3, T] of what the hosts make."""
    if isinstance(iterators, BatchIterator):
        iterators = [iterators]
    steps = []
    for _ in range(count):
        parts = [next(iterator) for iterator in iterators]
        steps.append(np.concatenate([np.stack([p.tokens, p.segment_ids, p.targets], axis=1) for p in parts]))
    return np.stack(steps)


def words(steps) -> Counter:
    """The words that begin in the rows: a word is cut at most where a row is."""
    found = Counter()
    for tokens, segments, _ in steps.reshape(-1, *steps.shape[-2:]):
        text = bytes(np.where((tokens < 256) & (segments >= 0), tokens, 10).astype(np.uint8).tolist())
        found.update(text.decode().split())
    return found


def test_held_out_files_are_never_trained_on(source):
    corpus = load_corpus(config(source), Tokenizer.bytes())
    sides = [{side.parts[0].documents[n].name for n in range(len(side))} for side in (corpus.train, corpus.held_out)]
    assert sides[0] and sides[1] and not sides[0] & sides[1] and len(sides[0] | sides[1]) == FILES
    held_out = {name[:2] for name in sides[1]}
    assert not {word[:2] for word in words(take(batches(source), 300)) if len(word) == 5} & held_out


def test_a_pass_shows_every_text_once_and_the_next_in_another_order(source):
    data = config(source, batch_size=1, eval_fraction=0.0)
    texts = load_corpus(data, Tokenizer.bytes()).train
    order = texts.order(0, endless=True)
    passes = [[order[p * len(texts) + n].ids.tobytes() for n in range(len(texts))] for p in range(2)]
    assert passes[0] != passes[1] and Counter(passes[0]) == Counter(passes[1])
    assert all(count == 1 for count in Counter(passes[0]).values())


def test_rows_of_a_step_come_from_different_files(source):
    tokens = take(batches(source), 20)[:, :, 0]
    distinct = [len({row[:2].tobytes() for row in step}) for step in tokens]
    assert np.mean(distinct) > 2.5


@pytest.mark.parametrize("count", [2, 4])
def test_hosts_make_the_batch_that_one_would(source, count):
    np.testing.assert_array_equal(take(hosts_of(source, count), 100), take(batches(source), 100))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (4, 2), (1, 4)])
def test_a_run_continues_on_half_or_twice_the_hosts(source, before, after):
    first, second = hosts_of(source, before), hosts_of(source, after)
    whole = batches(source)
    np.testing.assert_array_equal(take(first, 130), take(whole, 130))  # a packer's 64 rows end in between
    position = json.loads(json.dumps(join_positions([host.position() for host in first])))
    for host in second:
        host.seek(position)
    np.testing.assert_array_equal(take(second, 130), take(whole, 130))
    assert join_positions([host.position() for host in second]) == whole.position()


def test_reading_ahead_changes_nothing(source):
    ahead, plain = batches(source, workers=2), batches(source)
    np.testing.assert_array_equal(take(ahead, 100), take(plain, 100))
    assert ahead.position() == plain.position()
    ahead.close()


CONTINUE = """
import json, sys
from k3jax.config import DataConfig
from k3jax.data import BatchIterator, load_corpus
from k3jax.text import Tokenizer
data = DataConfig(source=sys.argv[1], seq_len=12, batch_size=4, eval_fraction=0.2)
iterator = BatchIterator(load_corpus(data, Tokenizer.bytes()).train, data)
iterator.seek(json.loads(sys.argv[2]))
print(json.dumps([next(iterator).tokens.tolist() for _ in range(5)]))
"""


def test_a_fresh_process_continues_where_the_position_says(source, root):
    iterator = batches(source)
    take(iterator, 700)  # into a later pass
    command = [sys.executable, "-c", CONTINUE, str(source), json.dumps(iterator.position())]
    resumed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    np.testing.assert_array_equal(np.array(json.loads(resumed)), take(iterator, 5)[:, :, 0])


@pytest.mark.parametrize("other", [{"eval_fraction": 0.5}, {"shuffle_seed": 1}, {"mixture": {"source": 1.0}}])
def test_other_texts_or_another_order_are_noticed(source, tmp_path, other):
    (tmp_path / "more.txt").write_text("other words\n" * 200)
    if "mixture" in other:
        other = {"mixture": {str(source): 1.0, str(tmp_path / "more.txt"): 2.0}}
    with pytest.raises(ConfigError, match="changed since the checkpoint"):
        batches(source, **other).seek(batches(source).position())


def test_a_mixture_draws_documents_by_their_weights(tmp_path):
    for name, letter, count in (("few", "a", 10), ("many", "b", 1000)):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{letter * 12}"}}\n' * count)
    mixture = {str(tmp_path / "few.jsonl"): 3.0, str(tmp_path / "many.jsonl"): 1.0}
    first = take(batches(None, mixture=mixture, eval_fraction=0.0), 250)[:, :, 0, 0]
    assert np.mean(first == ord("a")) == pytest.approx(0.75, abs=0.01)
    with pytest.raises(ConfigError, match="nowhere: no such file"):
        load_corpus(config(None, mixture={**mixture, "nowhere": 1.0}), Tokenizer.bytes())


def test_evaluation_rows_are_fixed_and_need_enough_held_out_text(source):
    corpus = load_corpus(config(source), Tokenizer.bytes())
    first, again = (corpus.eval_batches(config(source, eval_rows=10), batch_size=4) for _ in range(2))
    assert len(first) == 2
    np.testing.assert_array_equal(first[1].tokens, again[1].tokens)
    none = config(source, eval_fraction=0.0)
    with pytest.raises(ConfigError, match="0 rows are held out"):
        load_corpus(none, Tokenizer.bytes()).eval_batches(none, batch_size=4)
    with pytest.raises(ConfigError, match="all 74 documents"):
        load_corpus(config(source, eval_fraction=1.0), Tokenizer.bytes())


def chats(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataConfig(source=str(path), seq_len=512, batch_size=1, eval_fraction=0.0)


def test_a_chat_is_trained_on_what_the_assistant_writes(tmp_path):
    answer = {"role": "assistant", "content": "4", "reasoning": "sum"}
    question = {"role": "user", "content": "2+2?"}
    data = chats(tmp_path / "chats.jsonl", {"messages": [question, answer]}, {"messages": [question]})
    tokenizer = Tokenizer.bytes()
    batch = next(BatchIterator(load_corpus(data, tokenizer).train, data))
    written = tokenizer.decode([int(t) for t in batch.targets[batch.loss_mask]])
    assert written.startswith("sum<|close|>think<|sep|><|open|>response<|sep|>4<|close|>response<|sep|>")
    assert "2+2" not in written and batch.loss_mask[0].any()


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({"messages": [{"role": "user", "content": "x"}], "temperature": 1}, "line 1: 'temperature' is not a chat's"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "chats.jsonl#0: .*nobody"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no token to train on"),
    ],
)
def test_a_chat_that_cannot_be_trained_on_is_refused_at_once(tmp_path, chat, message):
    with pytest.raises(ConfigError, match=message):
        load_corpus(chats(tmp_path / "chats.jsonl", chat), Tokenizer.bytes())
