"""Tokens a second and MFU over the last steps, without the time that evaluations and checkpoints take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Int

from k3jax.config import TrainRun
from k3jax.train.flops import peak_flops, training_flops

STEPS = 20  # that a rate is taken over


@dataclass(frozen=True)
class Work:
    """What the rows of a batch hold: `tokens` that are no padding, of `places`, each seeing `keys` on average."""

    tokens: int
    places: int
    keys: float

    @classmethod
    def of(cls, segment_ids: Int[np.ndarray, "B T"]) -> Work:
        """The work in a batch with these segments, which are contiguous."""
        column = np.arange(segment_ids.shape[1])
        begins = np.concatenate([np.ones_like(segment_ids[:, :1]), np.diff(segment_ids)], axis=1) != 0
        since = column - np.maximum.accumulate(np.where(begins, column, 0), axis=1)
        real = segment_ids >= 0
        return cls(int(real.sum()), real.size, float(since[real].mean()) + 1)

    def of_more(self, factor: float) -> Work:
        """Of `factor` times as many rows like these."""
        return Work(round(self.tokens * factor), round(self.places * factor), self.keys)

    @property
    def padding(self) -> float:
        """Share of places that hold nothing."""
        return 1 - self.tokens / self.places


@dataclass(kw_only=True)
class Throughput:
    """The rate of a run; fed with the seconds that its steps have taken so far and the work done."""

    run: TrainRun
    seconds: float = 0.0  # at the start
    device_kind: str = ""
    devices: int = 1
    _marks: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=STEPS + 1))
    total: Work = field(default_factory=lambda: Work(0, 0, 0.0))

    def __post_init__(self) -> None:
        self._marks.append((self.seconds, 0.0, 0.0))

    @classmethod
    def of_run(cls, run: TrainRun, *, seconds: float) -> Throughput:
        """On the devices of this run."""
        return cls(run=run, seconds=seconds, device_kind=jax.devices()[0].device_kind, devices=jax.device_count())

    def count(self, work: Work, *, seconds: float) -> None:
        """A step was done; `seconds` have passed since the same moment as at the start."""
        _, tokens, flops = self._marks[-1]
        per_token = training_flops(
            self.run.model, keys=work.keys, mtp=self.run.mtp_weight > 0, frozen=self.run.lora.rank > 0
        )
        self._marks.append((seconds, tokens + work.tokens, flops + per_token * work.tokens))
        self.total = Work(self.total.tokens + work.tokens, self.total.places + work.places, work.keys)

    @property
    def tokens_per_s(self) -> float:
        """Tokens, padding not counted."""
        return self._rate(1)

    @property
    def mfu(self) -> float | None:
        """Operations that the model needs, of those that the devices could do; None for a device not in the table."""
        peak = peak_flops(self.device_kind)
        return None if peak is None else self._rate(2) / (peak * self.devices)

    @property
    def seconds_per_step(self) -> float:
        """Of the same steps."""
        return (self._marks[-1][0] - self._marks[0][0]) / max(len(self._marks) - 1, 1)

    def _rate(self, column: int) -> float:
        first, last = self._marks[0], self._marks[-1]
        return (last[column] - first[column]) / max(last[0] - first[0], 1e-9)
