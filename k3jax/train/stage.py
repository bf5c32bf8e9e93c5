"""The data of each stage of a run: its batches, and what it is evaluated on."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from k3jax.config import ConfigError, TrainRun
from k3jax.data import Batch, BatchIterator, Corpus, load_corpus
from k3jax.text import Tokenizer
from k3jax.text.tokenizer import MEDIA_PAD
from k3jax.train.devices import Devices


@dataclass(frozen=True, kw_only=True)
class StageData:
    """Steps `first` + 1 to `last` of a run. `run` is the run as it is in them, without stages."""

    run: TrainRun
    first: int
    last: int
    corpus: Corpus
    rows: range  # of a batch, that this process reads
    batches: BatchIterator
    eval_batches: list[Batch]

    def holds(self, step: int) -> bool:
        """Whether a checkpoint of `step` holds a position in this stage's data."""
        return self.first < step < self.last

    def evaluates_at(self, step: int) -> bool:
        """Whether step ends with an evaluation."""
        return bool(self.eval_batches) and (step == self.run.steps or step % self.run.eval_every == 0)


def load_stages(run: TrainRun, devices: Devices) -> list[StageData]:
    """The stages of a run; each begins a shuffled order of its own. Raises `ConfigError`."""
    try:
        tokenizer = Tokenizer.load(run.data.tokenizer)
    except ConfigError as error:
        raise ConfigError(f"data.tokenizer = {run.data.tokenizer}: {error}") from error
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(f"model.vocab_size = {run.model.vocab_size}: the tokenizer has {tokenizer.vocab_size} ids")
    if run.data.row_images and (pad := tokenizer.special_id(MEDIA_PAD)) != run.model.media_id:
        raise ConfigError(f"model.media_id = {run.model.media_id}: the tokenizer's {MEDIA_PAD} is {pad}")
    steps = itertools.pairwise([0, *run.stage_ends])
    return [_load(run.in_stage(n), devices, tokenizer, n, first, last) for n, (first, last) in enumerate(steps)]


def _load(run: TrainRun, devices: Devices, tokenizer: Tokenizer, number: int, first: int, last: int) -> StageData:
    devices.check_batch(run.data, accumulate=run.accumulate)
    data = dataclasses.replace(run.data, shuffle_seed=run.data.shuffle_seed + number)
    corpus = load_corpus(data, tokenizer)
    micro = run.data.batch_size // run.accumulate
    held_out: Any = corpus.eval_batches(run.data, batch_size=micro) if run.eval_every else []
    rows = devices.rows(run.data.batch_size)
    batches = BatchIterator(corpus.train, data, rows=rows)
    return StageData(run=run, first=first, last=last, corpus=corpus, rows=rows, batches=batches, eval_batches=held_out)
