"""Rows: texts never leak into each other, every target appears once, and gaps stay small."""

from collections import Counter

import grain
import numpy as np
import pytest

from k3jax.data.packing import Encoded, Pieces, pack

EOS = 99


def text(number, length, trained=None) -> Encoded:
    """`length` tokens `number`, then the end token."""
    return Encoded(ids=np.array([number] * length + [EOS], np.int32), trained=trained)


def rows(texts, seq_len, seed=0):
    order = grain.MapDataset.source(texts).to_iter_dataset(grain.ReadOptions(num_threads=0))
    return list(pack(order, seq_len=seq_len, seed=seed))


def pairs(pieces):
    return [
        pair for p in pieces for pair in zip(p["tokens"][p["loss_mask"]], p["targets"][p["loss_mask"]], strict=True)
    ]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_every_token_but_a_texts_first_is_a_target_exactly_once(length):
    ids = np.arange(length + 1, dtype=np.int32)
    pieces = Pieces(4).flat_map(Encoded(ids=ids))
    assert pairs(pieces) == [(n, n + 1) for n in range(length)]
    assert all(len(piece["tokens"]) == 4 for piece in pieces[:-1])


def test_only_trained_tokens_count_and_a_piece_without_any_is_dropped():
    trained = np.zeros(13, np.bool_)
    trained[[2, 11]] = True
    pieces = Pieces(4).flat_map(Encoded(ids=np.arange(13, dtype=np.int32), trained=trained))
    assert [piece["tokens"].tolist() for piece in pieces] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert pairs(pieces) == [(1, 2), (10, 11)]


def test_a_text_of_one_token_has_nothing_to_predict():
    assert Pieces(4).flat_map(Encoded(ids=np.array([5], np.int32))) == []


def test_rows_hold_whole_pieces_in_segments_of_their_own():
    lengths = [3, 1, 5, 2, 7, 4, 4, 9, 1, 1]
    found = Counter()
    for row in rows([text(n, length) for n, length in enumerate(lengths)], 6):
        for segment in range(row["segment_ids"].max() + 1):
            inside = np.flatnonzero(row["segment_ids"] == segment)
            assert np.array_equal(inside, np.arange(inside[0], inside[-1] + 1))
            assert len(set(row["tokens"][inside].tolist())) == 1
            assert set(row["targets"][inside].tolist()) <= {row["tokens"][inside[0]], EOS}
            found[int(row["tokens"][inside[0]])] += len(inside)
        gap = row["segment_ids"] < 0
        assert not row["loss_mask"][gap].any() and not row["tokens"][gap].any()
        assert row["loss_mask"][~gap].all()
    assert found == Counter(dict(enumerate(lengths)))


def test_best_fit_fills_the_tightest_gap():
    # 5 and 6 open a row each (of 8); 2 fits both, and leaves no gap in the second.
    packed = rows([text(1, 5), text(2, 6), text(3, 2), text(4, 3)], 8)
    assert sorted(sorted(set(row["tokens"].tolist())) for row in packed) == [[1, 4], [2, 3]]


@pytest.mark.parametrize(("mean", "most"), [(20, 0.01), (100, 0.04), (400, 0.04)])
def test_gaps_are_few(mean, most):
    lengths = np.random.default_rng(0).exponential(mean, 3000).astype(int) + 1
    packed = rows([text(1, length) for length in lengths], 256)[:-64]  # the last rows wait for more
    assert np.mean([row["segment_ids"] < 0 for row in packed]) < most


def test_the_order_follows_the_seed():
    texts = [text(n, 8) for n in range(20)]
    one, same, other = rows(texts, 8), rows(texts, 8), rows(texts, 8, seed=1)
    firsts = [[int(row["tokens"][0]) for row in packed] for packed in (one, same, other)]
    assert firsts[0] == firsts[1] != firsts[2] and sorted(firsts[0]) == list(range(20)) != firsts[0]
