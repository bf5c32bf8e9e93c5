"""How fast a device of each TPU generation computes, reads and sends, by the maker's data sheets.

Times made of these are estimates: nothing here was measured on a TPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3jax.train.flops import PEAK
from sharding.mesh import Slice


@dataclass(frozen=True)
class Chip:
    """Rates of one device (half a chip of tpu7x): a second's bfloat16 operations, memory bytes and bytes sent."""

    flops: float
    memory: float
    network: float  # over all links of the torus, one way


KIND = {"tpu7x": "TPU7x", "v6e": "TPU v6 lite", "v5p": "TPU v5", "v5e": "TPU v5 lite"}  # device_kind of each chip
CHIPS = {
    "tpu7x": Chip(PEAK[KIND["tpu7x"]], 7.37e12 / 2, 1.08e12 / 2),
    "v5p": Chip(PEAK[KIND["v5p"]], 2.765e12, 5.4e11),
    "v6e": Chip(PEAK[KIND["v6e"]], 1.64e12, 3.6e11),
    "v5e": Chip(PEAK[KIND["v5e"]], 0.82e12, 1.8e11),
}


def chip_of(slice_: Slice) -> Chip:
    """The chip of a slice."""
    return CHIPS[slice_.chip]
