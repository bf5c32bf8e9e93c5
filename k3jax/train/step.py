"""The state of a run and the one compiled step that advances it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.config import ConfigError, TrainRun
from k3jax.data import Batch
from k3jax.nn.loss import batch_loss, head_loss
from k3jax.nn.param import merge_model, split_model, value_and_grad
from k3jax.nn.transformer import Transformer
from k3jax.quant.qat import fake_quantize_experts
from k3jax.train.optimizer import Optimizer
from k3jax.train.router_balance import RouterCounts, count_router, no_counts, rebalance, router_metrics

Metrics = dict[str, Float[Array, ""]]
Sums = tuple[Any, tuple[Any, dict[str, RouterCounts]]]  # nats, (tokens, what the routers did)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything a step changes; `params` and `router_bias` are model-shaped, float32.

    The sixth part of a run's state, `data_position`, is the data iterator's JSON; it lives on the host and is saved in
    the same checkpoint.
    """

    step: Int[Array, ""]  # updates done
    params: Transformer
    opt_state: Any
    router_bias: Transformer


def init_state(model: Transformer, optimizer: Optimizer) -> TrainState:
    """The state at step 0."""
    params, router_bias, _ = split_model(model)
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params), router_bias=router_bias
    )


def model_of(state: TrainState, rest: Transformer) -> Transformer:
    """The model that a state describes; `rest` is the third part of `split_model`."""
    return merge_model(state.params, state.router_bias, rest)


def make_train_step(
    run: TrainRun, optimizer: Optimizer, rest: Transformer
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`train_step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    A batch of `run.accumulate` micro-batches gives the gradient of their common mean: nats summed over all of them,
    divided by all their tokens. With `run.qat` the gradient is taken at weights whose experts are rounded to MXFP4, and
    updates the unrounded ones. The step routes by `state.router_bias` and leaves the bias that would have balanced it.
    Metrics: `loss` (nats a token), `grad_norm` (before clipping), `lr`, `tokens`, and `router_metrics`. Raises
    `ConfigError` where every token would choose every expert.
    """
    top_k = run.model.moe.top_k
    if top_k == run.model.moe.num_experts:
        raise ConfigError(f"model.moe.top_k = {top_k}: training balances experts, so num_experts must be larger")

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        (nats, (tokens, counts)), grads = accumulated_gradient(_forward_model(state, rest, run), batch, run)
        count = jnp.maximum(tokens, 1.0)
        grads = jax.tree.map(lambda grad: grad / count, grads)
        params, opt_state, grad_norm = optimizer.update(grads, state.opt_state, state.params)
        router_bias = rebalance(state.router_bias, counts, top_k)
        metrics = {"loss": nats / count, "grad_norm": grad_norm, "lr": optimizer.schedule(state.step), "tokens": tokens}
        metrics |= router_metrics(counts, router_bias, top_k)
        state = TrainState(step=state.step + 1, params=params, opt_state=opt_state, router_bias=router_bias)
        return state, metrics

    return train_step


def accumulated_gradient(model: Transformer, batch: Batch, run: TrainRun) -> tuple[Sums, Transformer]:
    """(sums, gradient of the summed nats), over `run.accumulate` micro-batches one at a time."""
    gradient = value_and_grad(_watched_loss, has_aux=True)
    if run.accumulate == 1:
        return gradient(model, batch, run.loss_chunk)
    micro = jax.tree.map(lambda rows: rows.reshape(run.accumulate, -1, *rows.shape[1:]), batch)
    zero = jnp.zeros((), jnp.float32)
    zeros = ((zero, (zero, no_counts(run.model))), jax.tree.map(jnp.zeros_like, split_model(model)[0]))

    def add(total: Any, rows: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(model, rows, run.loss_chunk)), None

    return jax.lax.scan(add, zeros, micro)[0]


def make_eval_step(run: TrainRun, rest: Transformer) -> Callable[[TrainState, Batch], tuple[Any, Any]]:
    """`eval_step(state, batch) -> (summed nats, tokens)`, to be jitted."""

    def eval_step(state: TrainState, batch: Batch) -> tuple[Any, Any]:
        model = _forward_model(state, rest, run)
        return batch_loss(model, batch.tokens, batch.targets, batch.segment_ids, batch.loss_mask, chunk=run.loss_chunk)

    return eval_step


def _forward_model(state: TrainState, rest: Transformer, run: TrainRun) -> Transformer:
    """The model that the forward pass runs: under QAT with experts as they will be served."""
    model = model_of(state, rest)
    return fake_quantize_experts(model) if run.qat else model


def _watched_loss(model: Transformer, batch: Batch, chunk: int) -> Sums:
    out = model.hidden(batch.tokens, segment_ids=batch.segment_ids, watch=count_router)
    nats, tokens = head_loss(model, out.hidden, batch.targets, batch.loss_mask, chunk=chunk)
    return nats, (tokens, out.watched)
