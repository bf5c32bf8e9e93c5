"""The plan of balanced experts: every rank computes as much, from one donor, and every row finds its place and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.expert_plan import balance, copies, routes
from sharding.expert_rows import order_by_expert


def random_counts(ranks, experts, cases, rng):
    """Rows from each rank for each expert: even, skewed or all for one expert; as many on each rank, or fewer."""
    found = []
    for case in range(cases):
        rows = int(rng.integers(1, 40))
        spread = rng.dirichlet(np.full(experts, rng.choice([0.02, 0.2, 5.0])))
        if case % 5 == 0:
            spread = np.eye(experts)[rng.integers(experts)]
        per_rank = rng.integers(0, rows + 1, ranks) if case % 3 == 0 else np.full(ranks, rows)
        found.append([rng.multinomial(n, spread) for n in per_rank])
    return np.int32(found)


@jax.jit
@jax.vmap
def plans(counts):
    size = counts.shape[0]
    plan = balance(jnp.sum(counts, axis=0).reshape(size, -1).sum(axis=1))
    return plan, jax.vmap(lambda rank: routes(counts, plan, rank))(jnp.arange(size)), copies(counts, plan)


@pytest.mark.parametrize(("ranks", "local", "cases"), [(2, 3, 100), (8, 2, 300), (128, 7, 3)])
def test_every_plan_is_balanced_and_every_row_comes_back(ranks, local, cases):
    counts = random_counts(ranks, ranks * local, cases, np.random.default_rng(ranks))
    found = jax.tree.map(np.asarray, plans(counts))
    for case in range(cases):
        check(counts[case], *jax.tree.map(lambda leaf: leaf[case], found))  # noqa: B023


def check(counts, plan, routes, needed):
    ranks, local = counts.shape[0], counts.shape[1] // counts.shape[0]
    experts = [np.repeat(np.arange(counts.shape[1]), row) for row in counts]  # of every source's rows
    work = plan.kept + plan.stop - plan.start
    assert work.sum() == counts.sum()
    assert work.max() - work.min() <= 1

    # One exchange by the library's rules, then the other way around.
    computed = [np.full(n, -1) for n in work]
    received = np.zeros(ranks, int)
    for source, target, segment in np.argwhere(routes.source.sizes.reshape(ranks, ranks, -1)):
        place = target * 2 * local + segment
        here, there, size = (leg[source, place] for leg in routes.source)
        back_there, back_here, back_size = (
            leg[target, source * 2 * local + segment]
            for leg in (routes.target.there, routes.target.here, routes.target.sizes)
        )
        assert (here, there, size) == (back_there, back_here, back_size)
        assert (computed[target][there : there + size] == -1).all()
        computed[target][there : there + size] = experts[source][here : here + size]
        received[source] += size
    assert (routes.target.sizes.sum() == routes.source.sizes.sum()) and (received == counts.sum(axis=1)).all()

    for rank, rows in enumerate(computed):
        own = np.arange(local) + local * np.array([[rank], [plan.donor[rank]]])
        assert rows.tolist() == np.repeat(own.reshape(-1), routes.group_sizes[rank]).tolist()
        copied = np.flatnonzero(routes.group_sizes[rank, local:])
        assert set(copied) <= set(range(needed.first[rank], needed.first[rank] + needed.number[rank]))
        assert needed.number[rank] <= local
    for donor in range(ranks):
        turns = needed.turn[(needed.donor == donor) & (needed.number > 0)]
        assert sorted(turns) == list(range(len(turns)))


@pytest.mark.parametrize("tokens", [1, 600])
def test_order_is_the_stable_sort_by_expert(tokens):
    ids = np.random.default_rng(tokens).integers(0, 41, size=(tokens, 4)).astype(np.int32)
    order = jax.jit(order_by_expert, static_argnums=(1, 2))(ids, 40, ids.size)
    used = int((ids < 40).sum())
    np.testing.assert_array_equal(order.pair[:used], np.argsort(ids.reshape(-1), kind="stable")[:used])
    np.testing.assert_array_equal(order.row[order.pair], np.arange(ids.size))
    np.testing.assert_array_equal(order.sizes, np.bincount(ids.reshape(-1), minlength=41)[:40])
    np.testing.assert_array_equal(order.used, ids.reshape(-1) < 40)
