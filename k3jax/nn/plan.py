"""StackPlan: which layer runs where in the scanned stack (docs/adr/0002)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from k3jax.config import ModelConfig

EMPTY = -1  # a slot that no layer fills


@dataclass(frozen=True)
class StackPlan:
    """The depth as [AttnRes blocks] x [units], a unit being up to K KDA layers and then at most one MLA layer.

    Leading dense layers stand apart (`prefix`). For K3 that is layer 0, then 8 blocks of 3 units of 3 + 1 slots, of
    which layers 1-92 fill all but four: one body for every KDA layer and one for every MLA layer.
    """

    config: ModelConfig
    prefix: tuple[int, ...]
    kda: np.ndarray  # [blocks, units, K] layer numbers, EMPTY where no layer is
    mla: np.ndarray  # [blocks, units]

    @classmethod
    def of(cls, config: ModelConfig) -> StackPlan | None:
        """The plan of `config`, or None where the dense layers fill more than the first block (use the loop)."""
        prefix = tuple(range(config.num_dense_layers))
        if len(prefix) > config.attn_res_block or len(prefix) == config.num_layers:
            return None
        blocks = [_units(config, block) for block in range(config.num_snapshots)]
        num_units = max(len(units) for units in blocks)
        num_kda = max(len(kda) for units in blocks for kda, _ in units)
        kda = np.full((len(blocks), num_units, num_kda), EMPTY)
        mla = np.full((len(blocks), num_units), EMPTY)
        for b, units in enumerate(blocks):
            for u, (kda_layers, mla_layer) in enumerate(units):
                kda[b, u, : len(kda_layers)] = kda_layers
                mla[b, u] = mla_layer
        return cls(config, prefix, kda, mla)

    @cached_property
    def seals(self) -> np.ndarray:
        """[blocks] bool: whether the block's first layer in the scan seals the sum before it."""
        return np.arange(len(self.kda)) * self.config.attn_res_block >= len(self.prefix)

    @cached_property
    def has_live(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every KDA and every MLA slot: whether the live sum before it holds anything, or its block just began."""
        kda, mla = np.zeros(self.kda.shape, bool), np.zeros(self.mla.shape, bool)
        for b, seal in enumerate(self.seals):
            begun = not seal
            for u in range(self.kda.shape[1]):
                for k in range(self.kda.shape[2]):
                    kda[b, u, k] = begun
                    begun |= self.kda[b, u, k] != EMPTY
                mla[b, u] = begun
                begun |= self.mla[b, u] != EMPTY
        return kda, mla


def _units(config: ModelConfig, block: int) -> list[tuple[list[int], int]]:
    """Cut the scanned layers of one AttnRes block into (KDA layers, MLA layer or EMPTY)."""
    first = max(block * config.attn_res_block, config.num_dense_layers)
    last = min((block + 1) * config.attn_res_block, config.num_layers)
    units: list[tuple[list[int], int]] = []
    kda: list[int] = []
    for layer in range(first, last):
        if config.is_mla(layer):
            units.append((kda, layer))
            kda = []
        else:
            kda.append(layer)
    return [*units, (kda, EMPTY)] if kda else units


@dataclass(frozen=True)
class Depth:
    """Positions of layers: in the stack of their kind (weights) and among the layers of their mixer (caches)."""

    config: ModelConfig

    @cached_property
    def layers_of(self) -> dict[str, list[int]]:
        """{kind: its layers in depth order}, kinds in order of first appearance."""
        kinds: dict[str, list[int]] = {}
        for layer in range(self.config.num_layers):
            kinds.setdefault(self.config.layer_kind(layer), []).append(layer)
        return kinds

    @cached_property
    def in_stack(self) -> np.ndarray:
        """[num_layers] index of each layer in the stack of its kind."""
        return self._rank([self.config.layer_kind(layer) for layer in range(self.config.num_layers)])

    @cached_property
    def in_cache(self) -> np.ndarray:
        """[num_layers] index of each layer among the KDA layers, or among the MLA layers."""
        return self._rank([self.config.is_mla(layer) for layer in range(self.config.num_layers)])

    @staticmethod
    def _rank(labels: list) -> np.ndarray:
        return np.array([labels[:i].count(label) for i, label in enumerate(labels)])
