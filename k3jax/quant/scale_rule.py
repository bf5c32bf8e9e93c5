"""Which scale rule a checkpoint's MXFP4 weights were made with, from the statistics of its bytes.

A block's largest code tells "ceil" apart: it may be 3, since that rule scales so that nothing clips; "floor" and "even"
leave it at 4 or 6 (training 7.3). These two differ in where a block goes up to the next scale: with the largest
magnitude at 2^e or already at 0.875 2^e, where rounding would reach 2^e. Scale and largest code together say between
which two edges a block's largest magnitude lies, so every rule gives a histogram of it; only under the right one is it
smooth, near a normal distribution of the logarithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr
from jaxtyping import Float, UInt8

from pallas_kernels.mx import BLOCK, Rule

MIN_BLOCKS = 1000
CLEARLY = 1.25  # a rule is named where the other one fits this much worse
THREE, FOUR, SIX = 5, 6, 7  # codes
# log2 of where codes 4 and 6 of scale exponent 0 begin.
EDGES: dict[Rule, tuple[float, float]] = {
    "floor": (0.0, math.log2(1.25)),
    "even": (math.log2(0.875), math.log2(1.25)),
}


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """The verdict: `rule`, None where the bytes do not tell; `shares` of the non-zero blocks by their largest value."""

    rule: Rule | None
    blocks: int
    shares: dict[float, float]

    def __str__(self) -> str:
        seen = ", ".join(f"{value:g} in {share:.1%}" for value, share in self.shares.items())
        return f"{self.rule or 'unknown'} (largest value of a block: {seen}; {self.blocks:,} blocks)"


def identify_scale_rule(
    weight_packed: UInt8[np.ndarray, "*lead half_in"], weight_scale: UInt8[np.ndarray, "*lead blocks"]
) -> ScaleRule:
    """Name the rule behind a checkpoint's codes uint8 [..., in/2] and scales uint8 [..., in/32].

    Blocks of zeros do not count. Raises ValueError for fewer than 1,000 others, which cannot tell the rules apart.
    """
    codes, scales = np.asarray(weight_packed).reshape(-1, BLOCK // 2), np.asarray(weight_scale).reshape(-1)
    largest = np.maximum(codes & 7, (codes >> 4) & 7).max(axis=-1)
    largest, scales = largest[largest > 0], scales[largest > 0]
    if len(largest) < MIN_BLOCKS:
        raise ValueError(f"{len(largest)} non-zero blocks: at least {MIN_BLOCKS} are needed to tell the rules apart")
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    shares = {value: float(np.mean(largest == code)) for code, value in enumerate(values) if np.any(largest == code)}
    return ScaleRule(rule=_verdict(largest, scales), blocks=len(largest), shares=shares)


def _verdict(largest: np.ndarray, scales: np.ndarray) -> Rule | None:
    if np.mean(largest < THREE) > 0.01:  # the largest code of every rule is at least 3
        return None
    if np.mean(largest == THREE) > 0.01:
        return "ceil"
    misfits = {rule: _misfit(largest, scales, *edges) for rule, edges in EDGES.items()}
    best, other = sorted(misfits, key=lambda rule: misfits[rule])
    return best if misfits[other] > CLEARLY * misfits[best] else None


def _misfit(largest: np.ndarray, scales: np.ndarray, four: float, six: float) -> float:
    """Twice the log-likelihood that the best normal distribution of log2(largest magnitude) lacks; 1 or more."""
    exponents = np.arange(scales.min(), scales.max() + 1)
    counts = np.array([np.sum((scales == e) & (largest == code)) for e in exponents for code in (FOUR, SIX)], float)
    edges = np.array([float(e) + start for e in exponents for start in (four, six)] + [exponents[-1] + 1 + four])
    means = np.average((edges[:-1] + edges[1:]) / 2, weights=counts) + np.linspace(-0.3, 0.3, 61)
    deviations = np.linspace(0.08, 1.2, 113)
    lacking = _deviance(counts, edges, means[:, None, None], deviations[None, :, None])
    return max(1.0, float(lacking.min()))


def _deviance(
    counts: np.ndarray, edges: np.ndarray, mean: np.ndarray, deviation: np.ndarray
) -> Float[np.ndarray, "..."]:
    cells = np.diff(np.asarray(ndtr(jnp.asarray((edges - mean) / deviation))), axis=-1)
    expected = counts.sum() * np.maximum(cells / cells.sum(axis=-1, keepdims=True), 1e-9)
    return 2 * np.sum(counts * np.log(np.maximum(counts, 1e-9) / expected), axis=-1)
