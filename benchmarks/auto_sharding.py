"""Memory that one layer's gradient takes on a pod when the compiler shards it, and in one manual `shard_map`.

usage: python -m benchmarks.auto_sharding [--kind kda_dense] [--topology tpu7x:8x8x8] [--way auto|manual]

The same module, weights in the same parts and the portable bodies of all kernels both times, since the compiler cannot
split a Pallas call. Needs the TPU compiler (`make aot` installs it), no TPU; docs/adr/0011 quotes what it prints.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax.config import load_model_config
from k3jax.nn.layer import Layer
from k3jax.nn.placement import lay_out, on_devices, on_mesh, specs_of, with_places
from k3jax.plan.compiled import topology_devices
from pallas_kernels.attn_res import BankRead
from pallas_kernels.dispatch import compiling_for
from sharding.mesh import find_slice
from sharding.rules import TRAIN

TOKENS = 8192  # of each device's one sequence
EXPERT = 128


def gradient(layer: Layer, bank: BankRead, x: Any) -> Any:
    """Of the sum of a layer's outputs, for its weights and its input."""

    def loss(layer: Layer, x: Any) -> Any:
        return jnp.sum(layer(bank, x, True)[0].astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1))(layer, x)


def compiled(kind: str, topology: str, way: str) -> Any:
    """The compiled gradient of a layer of the full model, one sequence a device, ways "auto" and "manual"."""
    devices = topology_devices(topology)
    config = load_model_config("k3")
    layer = jax.eval_shape(lambda: Layer(config, kind, jax.random.key(0), dtype=jnp.bfloat16))
    mesh, placement = lay_out({"fsdp": len(devices) // EXPERT, "expert": EXPERT}, TRAIN, layer, devices)
    rows, specs = placement.spec_of("batch"), specs_of(layer, placement)
    x = jax.ShapeDtypeStruct((len(devices), TOKENS, config.width), jnp.bfloat16)
    bank = BankRead(jax.ShapeDtypeStruct((2, *x.shape), x.dtype), jax.ShapeDtypeStruct((2, *x.shape[:2]), jnp.float32))
    reads = BankRead(*(PartitionSpec(None, *rows),) * 2)
    in_specs, out_specs = (specs, reads, rows), (specs, rows)
    places = [with_places(tree, mesh, spec) for tree, spec in zip((layer, bank, x), in_specs, strict=True)]
    if way == "auto":
        program = jax.jit(gradient, out_shardings=on_mesh(mesh, out_specs))
    else:
        program = on_devices(gradient, mesh, placement, in_specs=in_specs, out_specs=out_specs, donate=())
    with compiling_for("cpu"):  # the bodies that are not Pallas kernels
        return program.trace(*places).lower(lowering_platforms=("tpu",)).compile()


def main() -> None:
    """Print what each way takes; an error of the compiler, such as one of memory, counts as its answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="kda_dense", choices=("kda_dense", "kda_moe", "mla_moe"))
    parser.add_argument("--topology", default="tpu7x:8x8x8", type=lambda name: find_slice(name).topology)
    parser.add_argument("--way", choices=("auto", "manual"))
    options = parser.parse_args()
    for way in [options.way] if options.way else ["manual", "auto"]:
        try:
            memory = compiled(options.kind, options.topology, way).memory_analysis()
            said = f"{memory.temp_size_in_bytes / 2**30:.1f} GiB of temporaries a device"
        except jax.errors.JaxRuntimeError as error:
            said = str(error).splitlines()[0][:300]
        print(f"{options.kind}, {options.topology}, {way}: {said}", flush=True)


if __name__ == "__main__":
    main()
