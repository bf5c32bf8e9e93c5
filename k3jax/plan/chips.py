"""How fast a device of each TPU generation computes, reads and sends, by the maker's data sheets.

Times made of these are estimates: nothing here was measured on a TPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharding.mesh import Slice


@dataclass(frozen=True)
class Chip:
    """Rates of one device (half a chip of tpu7x): a second's bfloat16 operations, memory bytes and bytes sent."""

    flops: float
    memory: float
    network: float  # over all links of the torus, one way


CHIPS = {
    "tpu7x": Chip(2307e12 / 2, 7.37e12 / 2, 1.08e12 / 2),
    "v5p": Chip(459e12, 2.765e12, 5.4e11),
    "v6e": Chip(918e12, 1.64e12, 3.6e11),
    "v5e": Chip(197e12, 0.82e12, 1.8e11),
}


def chip_of(slice_: Slice) -> Chip:
    """The chip of a slice."""
    return CHIPS[slice_.chip]
