"""A tiny random model, its engine, and an engine without a model that answers from a table."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest

from k3jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3jax.nn.transformer import Transformer
from k3jax.serve.engine import Engine
from k3jax.serve.sampler import Logprobs, Sampled, Sampling
from k3jax.text import Tokenizer

BYTES = Tokenizer.bytes()


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
        max_context=256,
        init_std=0.3,
        quantized_experts=False,
        dtype="float32",
        kda=KDAConfig(num_heads=2, head_dim=16, a_log_length=16),
        mla=MLAConfig(num_heads=2, q_rank=16, kv_rank=12, nope_dim=8, extra_dim=4, v_dim=8),
        moe=MoEConfig(num_experts=4, top_k=2, num_shared=1, expert_width=32, latent_width=16),
    )


@pytest.fixture(scope="session")
def model(config: ModelConfig) -> Transformer:
    return Transformer(config, jax.random.key(0))


@pytest.fixture(scope="session")
def compile_messages() -> list[str]:
    """What the engine reported while it was built."""
    return []


@pytest.fixture(scope="session")
def engine(model: Transformer, compile_messages: list[str]) -> Engine:
    return Engine(model, slots=3, max_context=96, prefill_chunk=8, max_top_logprobs=4, report=compile_messages.append)


class TableEngine:
    """Answers each prompt with `reply(prompt)` byte by byte, then the end id; a reply of None gives NaN logits.

    `calls` counts prefill chunks and decode steps.
    """

    def __init__(self, reply: Callable[[bytes], bytes | None], *, slots: int = 3, prefill_chunk: int = 4) -> None:
        self.slots, self.prefill_chunk = slots, prefill_chunk
        self._reply = reply
        self._prompts: list[list[int]] = [[] for _ in range(slots)]
        self._generated = [0] * slots
        self.calls = {"prefill": 0, "decode": 0}
        self.fed: list[tuple[int, tuple[int, ...]]] = []

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        fresh: bool,
        logprobs: bool,
        allowed: np.ndarray | None = None,
    ) -> Sampled:
        assert 1 <= len(tokens) <= self.prefill_chunk
        assert fresh or self._prompts[slot]
        self.calls["prefill"] += 1
        self.fed.append((slot, tuple(tokens)))
        self._prompts[slot] = [*([] if fresh else self._prompts[slot]), *tokens]
        self._generated[slot] = 0
        return self._sampled([self._next(slot)])

    def decode(
        self, tokens: np.ndarray, active: np.ndarray, *, logprobs: bool, allowed: np.ndarray | None = None
    ) -> Sampled:
        self.calls["decode"] += 1
        for slot in np.flatnonzero(active):
            assert tokens[slot] == self._next(slot), "the token fed must be the one sampled before"
            self._generated[slot] += 1
        return self._sampled([self._next(slot) if active[slot] else None for slot in range(self.slots)])

    def _next(self, slot: int) -> int | None:
        reply = self._reply(BYTES.decode_bytes(self._prompts[slot]))
        if reply is None:
            return None
        return reply[self._generated[slot]] if self._generated[slot] < len(reply) else 257

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
