"""tokamax's `gmm_v2` on MXFP4 experts: two calls, w1 and w3 with SiTU fused, then w2; the router's weights by XLA.

Codes are float4 [E, in, out] and scales float32 [E, in/32, 1, out], 0.625 bytes an element. Its kernel has a branch for
every number of rows that a tile may have and the schedule shows all of them, so it is given tiles with one branch: the
smallest that holds the rows, as wide as its own `calculate_tiling` makes them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases.case import Case, Program, shape
from benchmarks.peers.tokamax_kda import DISTRIBUTIONS, lowering

__all__ = ["CASES", "DISTRIBUTIONS", "lowering"]

WIDTH, HIDDEN, EXPERTS, FEW = 3584, 3072, 56, 8
BLOCK = 32


def _weight(experts: int, width: int, out: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return shape(jnp.float4_e2m1fn, experts, width, out), shape(jnp.float32, experts, width // BLOCK, 1, out)


def _tiles(branch: int, *arguments: Any) -> Any:
    """Its own tiles, with one branch of `branch` rows."""
    from dataclasses import replace

    from tokamax._src.ops.gmm_v2.gmm_v2 import calculate_tiling

    return replace(calculate_tiling(*arguments), tile_m=branch, bucket_base=branch)


def _mlp(rows: int, experts: int, branch: int) -> Program:
    """`rows` rows in each of `experts` experts, from sorted bf16 rows to weighted bf16 rows."""
    from tokamax._src.ops.gmm_v2.gmm_v2 import gmm_v2

    product = partial(gmm_v2, tile_info=partial(_tiles, branch), maybe_quantize_lhs=False)

    def mlp(x: Any, w13: Any, w2: Any, sizes: Any, row_weights: Any) -> Any:
        hidden = product(x, w13[0], sizes, w13[1], fuse_act="situ:4.0:25.0")
        return (product(hidden, w2[0], sizes, w2[1]) * row_weights[:, None]).astype(x.dtype)

    tokens = shape(jnp.bfloat16, rows * experts, WIDTH)
    weights = _weight(experts, WIDTH, 2 * HIDDEN), _weight(experts, HIDDEN, WIDTH)
    return mlp, (tokens, *weights, shape(jnp.int32, experts), shape(jnp.float32, rows * experts)), ()


def _case(name: str, rows: int, experts: int, branch: int) -> Case:
    """Traced loops of either kernel: tiles of an expert, experts, rows to zero before and after, all tiles."""
    tiles = rows // branch or 1
    return Case(name, experts, partial(_mlp, rows, experts, branch), (tiles, experts, 0, 0, tiles * experts) * 2)


CASES = (
    *(_case(f"mxfp4_decode_r{rows}", rows, EXPERTS, 64) for rows in (2, 4, 16)),
    *(_case(f"mxfp4_prefill_r{rows}", rows, FEW, min(rows, 256)) for rows in (128, 512)),
)
