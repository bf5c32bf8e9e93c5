"""Rows: documents never leak into each other, nothing is lost, and any row follows from its number."""

import numpy as np

from k3jax.data.packing import PackedRows, TokenStream

EOS = 9


def packed(lengths, seq_len, seed=0):
    documents = [np.full(length, n + 1, np.uint16) for n, length in enumerate(lengths)]
    return PackedRows(stream=TokenStream.shuffled(documents, eos_id=EOS, seed=seed), seq_len=seq_len)


def test_every_document_appears_once_and_ends_with_the_end_token():
    tokens = packed([3, 1, 5], 4).stream.tokens.tolist()
    documents = "".join(map(str, tokens)).split(str(EOS))
    assert documents[-1] == "" and sorted(documents[:-1]) == ["111", "2", "33333"]


def test_targets_are_the_next_token_of_the_same_document():
    rows = packed([3, 1, 5, 2, 7], 4)
    stream = rows.stream
    for index in range(len(rows)):
        row = rows[index]
        for column in range(4):
            place = index * 4 + column
            if place >= len(stream.tokens):
                assert (row["segment_ids"][column], row["loss_mask"][column]) == (-1, False)
                continue
            assert row["tokens"][column] == stream.tokens[place]
            assert row["loss_mask"][column] == (stream.tokens[place] != EOS)
            assert row["targets"][column] == (stream.tokens[place + 1] if row["loss_mask"][column] else 0)


def test_every_token_but_a_documents_first_is_a_target_exactly_once():
    rows = packed([3, 1, 5, 2, 7], 4)
    targets = [t for index in range(len(rows)) for t in rows[index]["targets"][rows[index]["loss_mask"]]]
    assert len(targets) == 3 + 1 + 5 + 2 + 7  # each document's tokens but one, and its end


def test_segments_count_from_zero_in_every_row():
    rows = packed([3, 1, 5, 2, 7], 6)
    for index in range(len(rows)):
        row = rows[index]
        used = row["segment_ids"][row["segment_ids"] >= 0]
        ends = np.flatnonzero(row["tokens"][: len(used)] == EOS) + 1
        assert used.tolist() == [int(np.sum(ends <= column)) for column in range(len(used))]


def test_only_the_last_row_has_padding():
    rows = packed([3, 1, 5, 2, 7], 4)
    assert len(rows) == 6  # 18 tokens and 5 ends
    assert [int(np.sum(rows[index]["segment_ids"] < 0)) for index in range(len(rows))] == [0, 0, 0, 0, 0, 1]


def test_the_order_follows_the_seed_and_the_fingerprint_follows_the_tokens():
    one, same, other = packed([3, 1, 5, 2], 4), packed([3, 1, 5, 2], 4), packed([3, 1, 5, 2], 4, seed=1)
    assert one.stream.tokens.tolist() == same.stream.tokens.tolist() != other.stream.tokens.tolist()
    assert one.stream.fingerprint == same.stream.fingerprint != packed([3, 1, 5, 3], 4).stream.fingerprint


def test_only_trained_tokens_are_targets():
    documents = [np.full(n, n, np.uint16) for n in (3, 6)]
    trained = [np.arange(n) % 2 == 1 for n in (3, 6)]
    stream = TokenStream.shuffled(documents, eos_id=EOS, seed=0, trained=trained)
    rows = PackedRows(stream=stream, seq_len=4)
    counted = [t for index in range(len(rows)) for t in rows[index]["targets"][rows[index]["loss_mask"]]]
    assert sorted(counted) == [3, 6, 6, 6]
    assert stream.fingerprint != TokenStream.shuffled(documents, eos_id=EOS, seed=0).fingerprint
