"""Batches: an order that does not depend on hosts or threads, and a position that survives the process."""

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from k3jax.config import ConfigError, DataConfig
from k3jax.data import BatchIterator, load_corpus
from k3jax.text import Tokenizer

FILES = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for n in range(FILES):
        (folder / f"{n:02}.txt").write_text(f"{n:02}" * 200)
    return folder


def config(source, **options) -> DataConfig:
    return DataConfig(**{"source": str(source), "seq_len": 16, "batch_size": 4, "eval_fraction": 0.2} | options)


def batches(source, **options) -> BatchIterator:
    hosts = {key: options.pop(key) for key in ("host", "hosts") if key in options}
    data = config(source, **options)
    return BatchIterator(load_corpus(data, Tokenizer.bytes()).train, data, **hosts)


def take(iterator, count) -> np.ndarray:
    return np.stack([next(iterator).tokens for _ in range(count)])


def test_bytes_become_ids_and_documents_end_with_the_end_token(source):
    rows = load_corpus(config(source), Tokenizer.bytes()).train
    text = rows.stream.tokens.tolist()
    first = text[: text.index(Tokenizer.bytes().eos_id)]
    assert bytes(first).decode() in {f"{n:02}" * 200 for n in range(FILES)}


def test_held_out_files_are_never_trained_on(source):
    corpus = load_corpus(config(source), Tokenizer.bytes())
    train, held_out = ({bytes(d[:2]) for d in _documents(rows)} for rows in (corpus.train, corpus.held_out))
    assert train and held_out and not train & held_out and len(train | held_out) == FILES


def _documents(rows):
    ends = rows.stream.ends
    return [rows.stream.tokens[begin:end].astype(np.uint8) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def test_every_epoch_visits_every_row_once_and_in_another_order(source):
    rows = load_corpus(config(source), Tokenizer.bytes()).train
    tokens = take(batches(source), len(rows)).reshape(4, len(rows), 16)  # batches of 4: exactly four epochs
    expected = Counter(rows[index]["tokens"].tobytes() for index in range(len(rows)))
    assert all(Counter(row.tobytes() for row in epoch) == expected for epoch in tokens)
    assert not np.array_equal(tokens[0], tokens[1])


def test_rows_of_a_step_come_from_different_files(source):
    tokens = take(batches(source), 20)
    distinct = [len({row[:2].tobytes() for row in step}) for step in tokens]
    assert np.mean(distinct) > 3.0


def test_hosts_share_the_rows_of_each_step(source):
    whole = take(batches(source), 8)
    halves = [take(batches(source, host=host, hosts=2), 8) for host in (0, 1)]
    for step in range(8):
        together = {row.tobytes() for half in halves for row in half[step]}
        assert together == {row.tobytes() for row in whole[step]}


def test_reading_ahead_changes_nothing(source):
    np.testing.assert_array_equal(take(batches(source), 20), take(batches(source, workers=2), 20))


CONTINUE = """
import json, sys
from k3jax.config import DataConfig
from k3jax.data import BatchIterator, load_corpus
from k3jax.text import Tokenizer
data = DataConfig(source=sys.argv[1], seq_len=16, batch_size=4, eval_fraction=0.2)
iterator = BatchIterator(load_corpus(data, Tokenizer.bytes()).train, data)
iterator.seek(json.loads(sys.argv[2]))
print(json.dumps([next(iterator).tokens.tolist() for _ in range(5)]))
"""


def test_a_fresh_process_continues_where_the_position_says(source, root):
    iterator = batches(source)
    take(iterator, 700)  # into a later epoch
    position = json.dumps(iterator.position())
    command = [sys.executable, "-c", CONTINUE, str(source), position]
    resumed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    np.testing.assert_array_equal(np.array(json.loads(resumed)), take(iterator, 5))


def test_changed_files_are_noticed(source, tmp_path):
    position = batches(source).position()
    (tmp_path / "other.txt").write_text("other words\n" * 2000)
    with pytest.raises(ConfigError, match="changed since the checkpoint"):
        batches(tmp_path / "other.txt").seek(position)


def test_evaluation_rows_are_fixed_and_need_enough_held_out_text(source):
    corpus = load_corpus(config(source), Tokenizer.bytes())
    first, again = (corpus.eval_batches(config(source, eval_rows=10), batch_size=4) for _ in range(2))
    assert len(first) == 2
    np.testing.assert_array_equal(first[1].tokens, again[1].tokens)
    none = config(source, eval_fraction=0.0)
    with pytest.raises(ConfigError, match="0 rows are held out"):
        load_corpus(none, Tokenizer.bytes()).eval_batches(none, batch_size=4)
    with pytest.raises(ConfigError, match="all 40 documents are held out"):
        load_corpus(config(source, eval_fraction=1.0), Tokenizer.bytes())


def test_a_chat_is_trained_on_what_the_assistant_writes(tmp_path):
    chat = {
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "reasoning": "sum"}]
    }
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    tokenizer = Tokenizer.bytes()
    corpus = load_corpus(DataConfig(source=str(tmp_path), seq_len=2048, eval_fraction=0.0), tokenizer)
    row = corpus.train[0]
    written = tokenizer.decode([int(t) for t in row["targets"][row["loss_mask"]]])
    assert written.startswith("sum<|close|>think<|sep|><|open|>response<|sep|>4<|close|>response<|sep|>")
    assert "2+2" not in written
    bad = {"messages": [{"role": "user", "content": "x"}], "temperature": 1}
    (tmp_path / "chats.jsonl").write_text(json.dumps(bad) + "\n")
    with pytest.raises(ConfigError, match="line 1: 'temperature' is not a chat's"):
        load_corpus(DataConfig(source=str(tmp_path)), tokenizer)
