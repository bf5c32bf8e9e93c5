"""Which rank computes which rows so that all compute equally many, and where every row lies on its way there and back.

Expert e lives on rank e // G, G experts a rank. The rows of a rank's experts, sorted by expert and then by the rank
that their tokens come from, are the rank's list. Ranks whose list is too long leave its end to others, each of which
fills up from one donor only, so that copies of that donor's G experts are all it ever needs: at most E / R copies. That
is the alias method for sampling; here without a loop, as all surpluses and all deficits laid end to end, by rank, are
two partitions of one line:

    surplus   |----- rank 0 -----|-- rank 3 --|---- rank 4 ----|       donors, in order
    deficit   |- 1 -|-- 2 --|---- 5 ----|--- 6 ---|---- 7 -----|       each takes from the donor where it begins

Rank 5 begins in the surplus of rank 0 and takes more than is left of it. Then rank 0 lacks as much, and fills up from
the next donor, rank 3. Every rank computes the same plan from the same counts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32


class Plan(NamedTuple):
    """Rank r computes the first `kept[r]` rows of its own list, and of `donor[r]`'s those of [start[r], stop[r])."""

    kept: Int32[Array, " R"]
    donor: Int32[Array, " R"]
    start: Int32[Array, " R"]
    stop: Int32[Array, " R"]


class Leg(NamedTuple):
    """One rank's part in an exchange of rows: segment i of [R, 2G] goes to, or comes from, rank i // 2G."""

    here: Int32[Array, " R_2G"]  # first row on this rank
    there: Int32[Array, " R_2G"]  # first row on the other
    sizes: Int32[Array, " R_2G"]


class Routes(NamedTuple):
    """Segments between a rank's rows in order of expert (`source`) and those that it computes (`target`).

    `group_sizes` are the rows computed for each of its own G experts, then for each of its donor's.
    """

    source: Leg
    target: Leg
    group_sizes: Int32[Array, " 2G"]


class Copies(NamedTuple):
    """Rank r needs experts [first[r], first[r] + number[r]) of its donor, whose `turn[r]`-th recipient it is."""

    donor: Int32[Array, " R"]
    first: Int32[Array, " R"]
    number: Int32[Array, " R"]
    turn: Int32[Array, " R"]


def balance(loads: Int32[Array, " R"]) -> Plan:
    """Split the rows of all lists so that every rank computes the same number, up to the remainder of the division."""
    ranks = jnp.arange(loads.shape[0])
    total = jnp.sum(loads)
    target = total // loads.shape[0] + (ranks < total % loads.shape[0])
    surplus, deficit = jnp.maximum(loads - target, 0), jnp.maximum(target - loads, 0)
    given, taken = jnp.cumsum(surplus), jnp.cumsum(deficit)  # ends of each rank's piece of the line
    # Where the last taker from a donor's piece ends: what lies past the piece is the donor's own deficit then.
    reach = jnp.min(jnp.where(taken[None] >= given[:, None], taken[None], taken[-1]), axis=1)
    donates = surplus > 0
    need = jnp.where(donates, reach - given, deficit)
    begin = jnp.where(donates, given, taken - deficit)
    donor = jnp.sum(given[None] <= begin[:, None], axis=1, dtype=jnp.int32)
    donor = jnp.where(need > 0, donor, ranks)
    stop = loads[donor] - (begin - (given - surplus)[donor])
    stop = jnp.where(need > 0, stop, 0)
    return Plan(target - need, donor, stop - need, stop)


def routes(counts: Int32[Array, "R E"], plan: Plan, rank: Int32[Array, ""]) -> Routes:
    """The segments of `rank`, where `counts[r, e]` rows of rank r's tokens are for expert e.

    Segment (u, h, j) holds its rows for expert j of rank u (h = 0) or of u's donor (h = 1) that u computes.
    """
    size = counts.shape[0]
    experts = counts.shape[1] // size
    ends = jnp.cumsum(jnp.sum(counts, axis=0).reshape(size, experts), axis=1)  # of each expert's rows in its list
    before = jnp.cumsum(counts, axis=0) - counts
    first = (ends - jnp.sum(counts, axis=0).reshape(size, experts)).reshape(-1) + before  # [R, E], place in the list
    row = jnp.cumsum(counts, axis=1) - counts  # [R, E], place among the source's rows

    owner = jnp.stack([jnp.arange(size), plan.donor], axis=1)  # [R, 2]
    low = jnp.stack([jnp.zeros_like(plan.start), plan.start], axis=1)[..., None]
    high = jnp.stack([plan.kept, plan.stop], axis=1)[..., None]
    base = jnp.stack([jnp.zeros_like(plan.kept), plan.kept], axis=1)[..., None]

    def segments(parts: list[Array], low: Array, high: Array, base: Array) -> tuple[Array, ...]:
        first, count, row = parts
        begin, end = jnp.clip(first, low, high), jnp.clip(first + count, low, high)
        used = end > begin
        at_source, at_target = row + begin - first, base + begin - low
        return tuple(x.reshape(-1) for x in (jnp.where(used, at_source, 0), jnp.where(used, at_target, 0), end - begin))

    by_home = [x.reshape(size, size, experts) for x in (first, counts, row)]
    outgoing = segments([x[rank][owner] for x in by_home], low, high, base)
    incoming = segments([x[:, owner[rank]] for x in by_home], low[rank], high[rank], base[rank])
    list_ends = jnp.clip(ends[owner[rank]], low[rank], high[rank])
    group_sizes = jnp.diff(list_ends, axis=1, prepend=low[rank]).reshape(-1)
    return Routes(Leg(outgoing[0], outgoing[1], outgoing[2]), Leg(incoming[1], incoming[0], incoming[2]), group_sizes)


def copies(counts: Int32[Array, "R E"], plan: Plan) -> Copies:
    """Which experts of its donor each rank has rows for: neighbours, as it computes one piece of the donor's list."""
    totals = jnp.sum(counts, axis=0).reshape(counts.shape[0], -1)[plan.donor]
    ends = jnp.cumsum(totals, axis=1)
    used = (ends > plan.start[:, None]) & (ends - totals < plan.stop[:, None])
    takes = plan.stop > plan.start
    same = (plan.donor[:, None] == plan.donor[None]) & takes[None]
    turn = jnp.sum(same & (plan.start[None] > plan.start[:, None]), axis=1, dtype=jnp.int32)
    return Copies(
        plan.donor,
        jnp.argmax(used, axis=1).astype(jnp.int32),
        jnp.where(takes, jnp.sum(used, axis=1, dtype=jnp.int32), 0),
        turn,
    )
