"""A tiny random model, its engine, and an engine without a model that answers from a table."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax.checkpoint.orbax_io import DATA, MODEL, WEIGHTS, Checkpoints, model_record
from k3jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, ServeRun
from k3jax.nn.transformer import Transformer
from k3jax.serve.engine import Chunk, Engine, Sizes
from k3jax.serve.run import Loaded
from k3jax.serve.sampler import Logprobs, Sampled
from k3jax.text import Tokenizer

BYTES = Tokenizer.bytes()
# One recipe for most tests, in this process and in those that they start: a run compiles its programs once.
RECIPE = {"slots": 3, "max_context": 1024, "prefill_chunk": 8, "max_top_logprobs": 4}


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return ModelConfig(
        name="tiny",
        vocab_size=512,
        width=32,
        num_layers=3,
        num_dense_layers=1,
        dense_width=48,
        mla_layers=(1,),
        attn_res_block=2,
        max_context=1024,
        init_std=0.3,
        quantized_experts=False,
        dtype="float32",
        kda=KDAConfig(num_heads=2, head_dim=16, a_log_length=16),
        mla=MLAConfig(num_heads=2, q_rank=16, kv_rank=12, nope_dim=8, extra_dim=4, v_dim=8),
        moe=MoEConfig(num_experts=4, top_k=2, num_shared=1, expert_width=32, latent_width=16),
    )


@pytest.fixture(scope="session")
def model(config: ModelConfig) -> Transformer:
    return random_model(config, 0)


def random_model(config: ModelConfig, seed: int) -> Transformer:
    """A model of random weights; one compiled program makes them."""
    return jax.jit(lambda key: Transformer(config, key))(jax.random.key(seed))


@pytest.fixture(scope="session")
def compile_messages() -> list[str]:
    """What the engine reported while it was built."""
    return []


@pytest.fixture(scope="session")
def engine(model: Transformer, compile_messages: list[str]) -> Engine:
    jobs = Loaded(run=ServeRun(**RECIPE), model=model, tokenizer=BYTES).jobs(compile_messages.append)
    return jobs.scheduler._device


def write_recipe(path: Path, **more: object) -> None:
    """`RECIPE` as a file, with more keys."""
    path.write_text("".join(f"{name}: {value}\n" for name, value in {**RECIPE, **more}.items()))


def save_run(model: Transformer, folder: Path) -> None:
    """What a training run with the byte tokenizer leaves of a model: a checkpoint to serve."""
    checkpoints = Checkpoints(folder, keep=1)
    records = {MODEL: model_record(model.config), DATA: {"tokenizer": "bytes"}}
    checkpoints.save(1, trees={WEIGHTS: model}, records=records)
    checkpoints.close()


class TableEngine:
    """Answers each prompt with `reply(prompt)` byte by byte, then the end id; a reply of None gives NaN logits.

    Its memory is what an engine's is, in each of `shares`: a state for each slot (the tokens read so far) and tokens in
    pages, which a sequence must have left there whole. `calls` counts prefill chunks and decode steps, `fed` is what
    the former read.
    """

    def __init__(
        self,
        reply: Callable[[bytes], bytes | None],
        *,
        slots: int = 3,
        prefill_chunk: int = 4,
        page: int = 2,
        pages: int = 1000,
        snapshots: int = 0,
        prefill_rows: int = 1,
        shares: int = 1,
    ) -> None:
        each = Sizes(
            slots=slots,
            snapshots=snapshots,
            pages=pages,
            page=page,
            table_width=min(pages - 1, 256),
            prefill_chunk=prefill_chunk,
            prefill_rows=prefill_rows,
        )
        self.sizes, self._each = each.times(shares), each
        self._reply = reply
        self._states: list[list[list[int]]] = [[[] for _ in range(slots + snapshots)] for _ in range(shares)]
        self._prompts: list[list[int]] = [[] for _ in range(slots * shares)]
        self._pages: list[list[list[int]]] = [[[-1] * page for _ in range(pages)] for _ in range(shares)]
        self.calls = {"prefill": 0, "decode": 0}
        self.fed: list[tuple[int, tuple[int, ...]]] = []

    def vocabulary_bits(self, tokens: Sequence[int]) -> np.ndarray:
        return np.asarray(sorted(set(tokens)))

    def prefill(self, chunks: Sequence[Chunk], *, logprobs: bool) -> Sampled:
        rows = [chunk.slot // self._each.slots for chunk in chunks]
        assert rows and max(map(rows.count, rows)) <= self._each.prefill_rows
        self.calls["prefill"] += 1
        for chunk in chunks:
            assert 1 <= len(chunk.tokens) <= self.sizes.prefill_chunk
            assert chunk.start % self.sizes.prefill_chunk == 0
            self.fed.append((chunk.slot, tuple(chunk.tokens)))
            if chunk.start == 0:
                self._state(chunk.slot).clear()
            self._read(chunk.slot, chunk.start, chunk.tokens, chunk.pages)
            self._prompts[chunk.slot] = list(self._state(chunk.slot))
        shape = len(chunks), self.sizes.prefill_chunk
        top = np.full((*shape, 2), -0.25, np.float32)
        prompt = Logprobs(chosen=top[..., 0], top_ids=np.full(top.shape, 65, np.int32), top=top)
        return replace(self._sampled([self._next(chunk.slot) for chunk in chunks]), prompt=prompt)

    def decode(
        self,
        tokens: np.ndarray,
        length: np.ndarray,
        page_table: np.ndarray,
        *,
        logprobs: bool,
        allowed: np.ndarray | None = None,
    ) -> Sampled:
        self.calls["decode"] += 1
        for slot in np.flatnonzero(length):
            assert tokens[slot] == self._next(slot), "the token fed must be the one sampled before"
            self._read(slot, int(length[slot]), [int(tokens[slot])], page_table[slot])
        return self._sampled([self._next(slot) if length[slot] else None for slot in range(self.sizes.slots)])

    def copy(self, source: int, target: int, *, share: int = 0) -> None:
        self._states[share][target] = list(self._states[share][source])

    def clear(self, pages: Sequence[int], *, share: int = 0) -> None:
        for page in pages:
            self._pages[share][page] = [-1] * self.sizes.page

    def _state(self, slot: int) -> list[int]:
        return self._states[slot // self._each.slots][slot % self._each.slots]

    def _read(self, slot: int, start: int, tokens: Sequence[int], pages: np.ndarray) -> None:
        size, state, pool = self.sizes.page, self._state(slot), self._pages[slot // self._each.slots]
        assert len(state) == start, "the state must be that after exactly the tokens before"
        for position, token in enumerate(tokens, start=start):
            page = pages[position // size]
            assert page > 0, "a token needs a page, and page 0 is nobody's"
            pool[page][position % size] = token
            state.append(token)
        held = [pool[pages[at // size]][at % size] for at in range(len(state))]
        assert held == state, "the pages must hold the whole sequence"

    def _next(self, slot: int) -> int | None:
        prompt, generated = self._prompts[slot], len(self._state(slot)) - len(self._prompts[slot])
        reply = self._reply(BYTES.decode_bytes(prompt))
        if reply is None:
            return None
        return reply[generated] if generated < len(reply) else 257

    def _sampled(self, tokens: list[int | None]) -> Sampled:
        ids = np.asarray([0 if token is None else token for token in tokens], np.int32)
        logprobs = Logprobs(
            chosen=np.full(len(ids), -0.5, np.float32),
            top_ids=np.stack([ids, ids + 1], axis=-1),
            top=np.tile(np.asarray([-0.5, -1.5], np.float32), (len(ids), 1)),
        )
        return Sampled(token=ids, finite=np.asarray([token is not None for token in tokens]), logprobs=logprobs)


@pytest.fixture
def table_engine() -> type[TableEngine]:
    return TableEngine
