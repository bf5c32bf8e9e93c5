"""Prefill and decode on meshes of eight devices are the one-device programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import load_model_config
from k3jax.nn.cache import Pools
from k3jax.nn.param import is_variable
from k3jax.nn.transformer import Transformer
from k3jax.serve.devices import ServeDevices
from k3jax.serve.programs import DecodeRows, PrefillRows, decode, prefill
from k3jax.serve.sampler import History, Sampling, SamplingRows, all_allowed
from sharding.local import Placement, placed
from sharding.pages import held_here, lengths_here, table_for_next
from sharding.rules import DECODE

ROWS, CHUNK, PAGE, WIDTH, STEPS = 4, 32, 16, 5, 3
VALID = np.array([30, 17, 1, 32])  # of each prompt's second chunk; the first is full
MESHES = {
    "data 2, tensor 2, context 2": {"data": 2, "tensor": 2, "context": 2},
    "context 8": {"context": 8},
    "expert 4, tensor 2": {"expert": 4, "tensor": 2},
}


@functools.cache
def model_config():
    config = load_model_config("k3_tiny")
    config.dtype = "float64"
    return config


def make_model() -> Transformer:
    model = Transformer(model_config(), jax.random.key(0), param_dtype="float64")
    return jax.tree.map(lambda v: v.replace(v.get_value().astype("float64")), model, is_leaf=is_variable)


def page_table(shares: int) -> np.ndarray:
    """Each row's pages, scattered, numbered within its share of the batch."""
    each = ROWS // shares
    numbers = np.random.default_rng(1).permutation(np.arange(1, 1 + each * WIDTH)).reshape(each, WIDTH)
    return np.tile(numbers, (shares, 1)).astype(np.int32)


@functools.cache
def run(sizes: tuple[tuple[str, int], ...]):
    """Greedy tokens and log-probabilities of two prompts read in two chunks and continued, and the last KDA states."""
    with jax.enable_x64(True):
        model, vocab = make_model(), model_config().vocab_size
        count = int(np.prod([size for _, size in sizes]))
        devices = {m: ServeDevices.of(dict(sizes), m, model, jax.devices()[:count]) for m in ("prefill", "decode")}
        shares = devices["decode"].shares
        pages = shares * (1 + ROWS // shares * WIDTH)
        pools, history = (
            Pools.zeros(model_config(), slots=ROWS, pages=pages, page=PAGE),
            History.zeros(slots=ROWS, vocab=vocab),
        )
        sampling = jax.tree.map(jnp.asarray, SamplingRows.of([Sampling(temperature=0.0)] * ROWS))
        allowed = jnp.asarray(all_allowed(ROWS, vocab))
        shared = {"page_table": jnp.asarray(page_table(shares)), "sampling": sampling, "allowed": allowed}
        slots = jnp.tile(jnp.arange(ROWS // shares), shares)
        tokens = np.random.default_rng(0).integers(0, 256, (ROWS, 2 * CHUNK)).astype(np.int32)

        programs, outputs = {}, []
        for start, valid in ((0, np.full(ROWS, CHUNK)), (CHUNK, VALID)):
            rows = PrefillRows(
                tokens=jnp.asarray(tokens[:, start : start + CHUNK]),
                num_valid=jnp.asarray(valid, jnp.int32),
                slots=slots,
                length=jnp.full(ROWS, start, jnp.int32),
                seen=jnp.zeros_like(allowed),
                **shared,
            )
            if "prefill" not in programs:
                programs["prefill"] = devices["prefill"].jit(functools.partial(prefill, top=1), pools, history, (rows,))
            pools, history, sampled = programs["prefill"](model, pools, history, rows)
        outputs.append(sampled)
        for step in range(STEPS):
            rows = DecodeRows(tokens=sampled.token, length=jnp.asarray(CHUNK + VALID + step, jnp.int32), **shared)
            if "decode" not in programs:
                programs["decode"] = devices["decode"].jit(functools.partial(decode, top=1), pools, history, (rows,))
            pools, history, sampled = programs["decode"](model, pools, history, rows)
            outputs.append(sampled)
        return jax.device_get(outputs), jax.device_get(pools.state)


SLOW = {"context 8", "data 2, tensor 2, context 2"}  # the second is what serve/test_mesh.py runs


@pytest.mark.parametrize(
    "sizes", [pytest.param(v, id=k, marks=[pytest.mark.soak] if k in SLOW else []) for k, v in MESHES.items()]
)
def test_prompts_in_two_chunks_and_three_tokens_equal_those_of_one_device(sizes):
    (ours, states), (theirs, expected) = run(tuple(sizes.items())), run(())
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.token, other.token)
        np.testing.assert_allclose(one.logprobs.chosen, other.logprobs.chosen, rtol=0, atol=1e-6)
        assert one.finite.all()
    np.testing.assert_allclose(states, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


def test_pieces_of_pages_hold_every_token_once():
    piece, devices, length = 4, 3, 31
    positions = np.arange(length)
    found = {}
    for device in range(devices):
        place = _on(device, devices, lambda: held_here(jnp.asarray(positions), piece))
        count = _on(device, devices, lambda: lengths_here(jnp.asarray([length]), piece))
        held = place[place >= 0]
        np.testing.assert_array_equal(np.sort(held), np.arange(count[0]))  # no gaps: lengths tell what is held
        found |= {int(p): device for p in positions[place >= 0]}
    assert sorted(found) == list(positions)


@pytest.mark.parametrize("length", [0, 3, 4, 11, 12, 13, 23, 24])
def test_the_next_token_is_seen_by_one_device_and_falls_in_a_hole_elsewhere(length):
    piece, devices = 4, 3
    table = jnp.arange(7, 9)[None]  # two pages of 12 tokens
    writers = []
    for device in range(devices):
        mine, lengths = _on(device, devices, lambda: table_for_next(table, jnp.asarray([length]), piece))
        target = int(lengths[0]) - 1
        page = int(mine[0, target // piece])
        if page >= 0:
            writers.append((device, page, target % piece))
    owner = (length % 12) // piece
    expected = [(owner, 7 + length // 12, length % piece)] if length < 24 else []
    assert writers == expected


def _on(device: int, devices: int, fn):
    """What `fn` returns on one of several devices that hold pieces of pages."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    placement = Placement.of({"tensor": devices}, DECODE, ())

    def local(_):
        with placed(placement):
            return jax.tree.map(lambda x: jnp.asarray(x)[None], fn())

    spec = jax.sharding.PartitionSpec("tensor")
    out = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(jnp.zeros(devices))
    return jax.tree.map(lambda x: np.asarray(x)[device], out)
