"""The programs of serving compile for a TPU, fit its memory and update their pools in place. Nothing is allocated."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ModelConfig, load_model_config
from k3jax.nn.cache import Pools
from k3jax.nn.transformer import Transformer
from k3jax.serve import programs
from k3jax.serve.programs import DecodeRows, PrefillRows
from k3jax.serve.sampler import History, Sampling, SamplingRows
from pallas_kernels.dispatch import compiling_for

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1500)]

MIB = 2**20
SLOTS, WIDTH, CHUNK, PAGE = 64, 64, 512, 128  # 64 sequences of 8,192 tokens


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_model_config("k3_mini")


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def decode_rows(words: int) -> DecodeRows:
    idle = np.zeros(SLOTS, np.int32)
    table, bits = np.zeros((SLOTS, WIDTH), np.int32), np.zeros((SLOTS, words), np.uint32)
    sampling: Any = SamplingRows.of([Sampling()] * SLOTS)
    return DecodeRows(tokens=idle, page_table=table, length=idle, sampling=sampling, allowed=bits)  # type: ignore[arg-type]


def prefill_rows(words: int) -> PrefillRows:
    one, bits = np.zeros(1, np.int32), np.zeros((1, words), np.uint32)
    sampling: Any = SamplingRows.of([Sampling()])
    arrays: Any = {"tokens": np.zeros((1, CHUNK), np.int32), "page_table": np.zeros((1, WIDTH), np.int32)}
    arrays |= {"num_valid": one, "slots": one, "length": one, "seen": bits, "allowed": bits}
    return PrefillRows(**arrays, sampling=sampling)


@pytest.mark.parametrize(
    ("program", "rows", "latents", "temporaries"),
    [
        pytest.param(programs.decode, decode_rows, None, 200 * MIB, id="decode"),
        pytest.param(programs.decode, decode_rows, jnp.float8_e4m3fn, 200 * MIB, id="decode_fp8"),
        pytest.param(programs.prefill, prefill_rows, None, 300 * MIB, id="prefill"),
    ],
)
def test_serving_k3_mini_copies_no_pool(config, compile_on, program, rows, latents, temporaries: int):
    """The temporaries are smaller than the latents and than the states. They are one layer's experts (bf16 here, so XLA
    slices them) and the stacks of attention and shared weights, which XLA lays out anew for its matrix products.
    """
    with compiling_for("tpu"):
        model = jax.eval_shape(lambda key: Transformer(config, key, param_dtype="bfloat16"), jax.random.key(0))
        options = {"slots": SLOTS + 64, "pages": 1 + SLOTS * WIDTH, "page": PAGE, "latents": latents}
        pools = jax.eval_shape(lambda: Pools.zeros(config, **options))
        history = jax.eval_shape(lambda: History.zeros(slots=SLOTS, vocab=config.vocab_size))
        arguments = model, pools, history, rows(config.vocab_size // 32)
        memory = compile_on(partial(program, top=5), *arguments, donate=(1, 2)).memory_analysis()

    assert memory.alias_size_in_bytes >= num_bytes((pools, history))
    assert memory.temp_size_in_bytes < temporaries
