"""K3's experts over the 128 devices of a slice compile for TPUs: a training layer, and a decode step."""

import collections
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.cases.case import shape
from pallas_kernels.grouped_matmul import expert_ffn
from pallas_kernels.mx import MXFP4Array, decode_layout
from sharding.expert_parallel import OUTPUT, PLAN, route

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

EXPERTS, LATENT, HIDDEN, TOP_K = 896, 3584, 3072, 16


def compute(rows, weights, group_sizes, row_weights):
    options = {"beta": 4.0, "linear_beta": 25.0, "row_weights": row_weights, "implementation": "tpu"}
    return expert_ffn(rows, *weights, group_sizes, **options)


@pytest.fixture
def compile_over(tpu7x, tmp_path):
    """`(lowered text, HLO text, memory)` of a function on 128 devices; arguments come with their specs."""

    def run(fn, sizes, out_specs, *arguments):
        devices = topologies.get_topology_desc(topology_name="tpu7x:4x4x4", platform="tpu").devices
        mesh = Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        specs = tuple(spec for _, spec in arguments)
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        placed = [
            jax.tree.map(lambda x, s=spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)), x)
            for x, spec in arguments
        ]
        start = time.perf_counter()
        lowered = jax.jit(mapped).trace(*placed).lower(lowering_platforms=("tpu",))
        dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
        memory = lowered.compile(compiler_options=dump).memory_analysis()
        text = next(tmp_path.glob("*after_optimizations.txt")).read_text()
        collectives = re.findall(r" (ragged-all-to-all|all-gather|reduce-scatter|all-reduce|all-to-all)\(", text)
        print(
            f"\n{time.perf_counter() - start:.0f} s, temporaries {memory.temp_size_in_bytes / 2**30:.2f} GiB, "
            f"{dict(collections.Counter(collectives))}"
        )
        return lowered.as_text(), text, memory

    return run


def exchanges(text):
    """How often each type of array is exchanged."""
    return collections.Counter(re.findall(r"@ragged_all_to_all.* -> tensor<(\S+)>", text))


def test_a_training_layer_exchanges_rows_five_times_and_sorts_nothing(compile_over):
    tokens = 8192

    def layer(latent, experts, weights, own):
        options = {"count": EXPERTS, "axes": ("expert",), "form": "balanced", "buffer_bytes": 2**30}
        out = route(latent, experts, weights, None, own, compute, **options).astype(latent.dtype)
        return jnp.tanh(checkpoint_name(out, OUTPUT))

    def loss(latent, weights, own, experts, cotangent):
        policy = jax.checkpoint_policies.save_only_these_names(OUTPUT, PLAN)
        out = jax.checkpoint(layer, policy=policy)(latent, experts, weights, own)
        return jnp.sum(out.astype(jnp.float32) * cotangent)

    def program(*arrays):
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(*arrays)
        return value[None], *gradients

    rows = 128 * tokens
    own = tuple(shape(jnp.bfloat16, EXPERTS, *widths) for widths in [(LATENT, HIDDEN)] * 2 + [(HIDDEN, LATENT)])
    latents = shape(jnp.bfloat16, rows, LATENT)
    arrays = latents, shape(jnp.float32, rows, TOP_K), own, shape(jnp.int32, rows, TOP_K), latents
    lowered, hlo, memory = compile_over(program, {"expert": 128}, P("expert"), *((x, P("expert")) for x in arrays))
    assert exchanges(lowered) == {
        "131072x3584xbf16": 5,  # out and back, out again for the gradients, theirs both ways
        "131072xf32": 2,  # weights of the choice and their gradients
        "14x3584x3072xbf16": 4,  # copies of two matrices of hot experts, forward and again
        "14x3072x3584xbf16": 2,  # the third
        "7x3584x3072xbf16": 2,  # their gradients
        "7x3072x3584xbf16": 1,
    }
    assert " sort(" not in hlo
    assert memory.temp_size_in_bytes < 9 * 2**30


def test_a_decode_step_gathers_tokens_once_and_sums_once(compile_over):
    tokens, axes = 128, ("data", "tensor")
    rows, widths = P("data"), P("data", "tensor")

    def step(latent, experts, weights, own):
        layouts = {"token_axes": ("data",), "latent_axes": ("tensor",)}
        return route(latent, experts, weights, None, own, compute, count=EXPERTS, axes=axes, form="gathered", **layouts)

    def quantized(outputs, inputs):
        codes, scales = (
            shape(jnp.uint8, EXPERTS, outputs, inputs // 2),
            shape(jnp.uint8, EXPERTS, outputs, inputs // 32),
        )
        return jax.eval_shape(functools.partial(decode_layout, layout="decode"), MXFP4Array(codes, scales))

    own = tuple(quantized(*widths) for widths in [(HIDDEN, LATENT)] * 2 + [(LATENT, HIDDEN)])
    choices = shape(jnp.int32, tokens, TOP_K), shape(jnp.float32, tokens, TOP_K)
    arguments = (shape(jnp.bfloat16, tokens, LATENT), widths), *((x, rows) for x in choices), (own, P(axes))
    lowered, _, memory = compile_over(step, {"data": 4, "tensor": 32}, rows, *arguments)
    collectives = re.findall(r"stablehlo\.(all_gather|all_reduce|reduce_scatter|all_to_all)", lowered)
    assert sorted(collectives) == ["all_gather", "all_reduce"]
    assert memory.temp_size_in_bytes < 2**28
