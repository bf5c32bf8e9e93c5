"""The state of a run and the one compiled step that advances it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from k3jax.config import ConfigError, TrainRun
from k3jax.data import Batch
from k3jax.nn.loss import batch_loss, head_loss, head_sums
from k3jax.nn.param import is_variable, island, merge_model, split_model, working_copy
from k3jax.nn.transformer import Transformer
from k3jax.nn.watch import Watch
from k3jax.quant.qat import fake_quantize_experts
from k3jax.train.guard import is_finite, keep_unless
from k3jax.train.lora import Adapter, merged
from k3jax.train.optimizer import Optimizer, clip_queries_and_keys
from k3jax.train.router_balance import RouterCounts, count_router, rebalance, router_metrics
from sharding.local import copies_of, largest, largest_anywhere, total, total_of_copies

Metrics = dict[str, Num[Array, "..."]]  # numbers to be logged, and arrays that become histograms
Rebalance = Callable[[Transformer, dict[str, RouterCounts], int], Transformer]
TOKENS = ("batch", "seq")  # the logical axes that share tokens out among devices
WATCH: Watch = {"router": count_router, "max_logit": lambda logits: jnp.max(logits, axis=0)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything a step changes, and the frozen weights under adapters; weights are float32.

    `params` and `router_bias` are model-shaped; with adapters `params` is those, by the names of what they adapt, and
    `frozen` the model-shaped weights. The last part of a run's state, `data_position`, is the data iterator's JSON; it
    lives on the host and is saved in the same checkpoint.
    """

    step: Int[Array, ""]  # updates done
    params: Any
    opt_state: Any
    router_bias: Transformer
    frozen: Transformer | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """What forward passes show: sums over tokens, router counts by kind of layer, and largest scores of MLA's heads."""

    sums: dict[str, Float[Array, ""]]
    counts: dict[str, RouterCounts] = field(default_factory=dict)
    max_logits: dict[str, Float[Array, "*layers H"]] = field(default_factory=dict)

    def __add__(self, other: Seen) -> Seen:
        """Of both: sums and counts add up, maxima do not."""
        add = lambda a, b: jax.tree.map(jnp.add, a, b)  # noqa: E731
        most = jax.tree.map(jnp.maximum, self.max_logits, other.max_logits)
        return Seen(add(self.sums, other.sums), add(self.counts, other.counts), most)

    def over_devices(self) -> Seen:
        """Of the tokens of all devices."""
        most = jax.tree.map(lambda x: largest(x, *TOKENS), self.max_logits)
        return Seen(total(self.sums, *TOKENS), total(self.counts, *TOKENS), most)


def init_state(model: Transformer, optimizer: Optimizer, *, adapters: dict[str, Adapter] | None = None) -> TrainState:
    """The state at step 0, of the model or of `adapters` on it."""
    params, router_bias, _ = split_model(model)
    frozen, trained = (None, params) if adapters is None else (params, adapters)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=trained,
        opt_state=optimizer.init(trained),
        router_bias=router_bias,
        frozen=frozen,
    )


def model_of(state: TrainState, rest: Transformer) -> Transformer:
    """The model that a state describes, adapters merged; `rest` is the third part of `split_model`."""
    params = state.params if state.frozen is None else merged(state.frozen, state.params)
    return merge_model(params, state.router_bias, rest)


def make_train_step(
    run: TrainRun, optimizer: Optimizer, rest: Transformer, *, rebalance: Rebalance = rebalance
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`train_step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    A batch of `run.accumulate` micro-batches gives the gradient of their common mean: nats summed over all of them,
    divided by all their tokens. With `run.qat` the gradient is taken at weights whose experts are rounded to MXFP4, and
    updates the unrounded ones. The step routes by `state.router_bias` and leaves the bias that would have balanced it.
    Where loss or gradient is not finite it leaves weights, optimizer and bias as they were, and `skipped` is 1.
    Metrics: `loss` (nats a token), `mtp_loss` where it is trained, `lr`, `tokens`, `max_logit` (of all heads), those of
    `Optimizer`, `router_metrics`, `skipped`, and by kind of layer the `expert_rows` of each layer and expert. Raises
    `ConfigError` where every token would choose every expert.
    """
    top_k = run.model.moe.top_k
    if top_k == run.model.moe.num_experts:
        raise ConfigError(f"model.moe.top_k = {top_k}: training balances experts, so num_experts must be larger")

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        seen, grads = accumulated_gradient(state, batch, run, rest)
        seen, grads = seen.over_devices(), jax.tree.map(_of_copies, grads, is_leaf=is_variable)
        count = jnp.maximum(seen.sums["tokens"], 1.0)
        grads = jax.tree.map(lambda grad: grad / count, grads)
        updated = optimizer.update(grads, state.opt_state, state.params, state.step)
        params = updated.params
        if state.frozen is None:
            params = clip_queries_and_keys(params, seen.max_logits, run.optimizer.qk_clip)
        router_bias = rebalance(state.router_bias, seen.counts, top_k)
        metrics = {"loss": seen.sums["nats"] / count, "lr": optimizer.schedule(state.step)}
        metrics |= {"tokens": seen.sums["tokens"], **updated.metrics, **_more_metrics(seen)}
        metrics |= router_metrics(seen.counts, router_bias, top_k)
        changed = {"params": params, "opt_state": updated.opt_state, "router_bias": router_bias}
        good = is_finite(metrics["loss"], metrics["grad_norm"])
        changed = keep_unless(good, changed, {name: getattr(state, name) for name in changed})
        metrics["skipped"] = (~good).astype(jnp.float32)
        return dataclasses.replace(state, step=state.step + 1, **changed), metrics

    return train_step


def make_warm_up(run: TrainRun, rest: Transformer) -> Callable[[TrainState, Batch], TrainState]:
    """`warm_up(state, batch) -> state`, to be jitted: `run.router_warmup` forward passes that only balance the routers.

    Before the first step the routers are badly unbalanced, and one pass corrects only most of it (training 1.3).
    """

    def warm_up(state: TrainState, batch: Batch) -> TrainState:
        params, _, other = split_model(_quantized(model_of(state, rest), run))

        def one_pass(router_bias: Transformer, _: None) -> tuple[Transformer, None]:
            model = merge_model(params, router_bias, other)
            seen = _over_micro_batches(lambda rows: _watched_loss(model, rows, run)[1], batch, run).over_devices()
            return rebalance(router_bias, seen.counts, run.model.moe.top_k), None

        router_bias, _ = jax.lax.scan(one_pass, state.router_bias, length=run.router_warmup)
        return dataclasses.replace(state, router_bias=router_bias)

    return warm_up


def accumulated_gradient(state: TrainState, batch: Batch, run: TrainRun, rest: Transformer) -> tuple[Seen, Any]:
    """(what was seen, gradient of the summed objective in float32), one micro-batch at a time."""
    if state.frozen is None:
        point = working_copy(_quantized(state.params, run), run.model.dtype)
        build = lambda params: merge_model(params, state.router_bias, rest)  # noqa: E731
    else:
        point, frozen = state.params, _quantized(state.frozen, run)
        build = lambda adapters: merge_model(merged(frozen, adapters), state.router_bias, rest)  # noqa: E731

    def gradient(rows: Batch) -> tuple[Seen, Any]:
        def objective(params: Any) -> tuple[Float[Array, ""], Seen]:
            whole, seen = _watched_loss(build(params), rows, run)
            return whole / copies_of(*TOKENS), seen  # this device's share of it

        (_, seen), grads = jax.value_and_grad(objective, has_aux=True)(point)
        return seen, jax.tree.map(lambda grad: grad.astype(island(grad.dtype)), grads)

    return _over_micro_batches(gradient, batch, run)


def _over_micro_batches(fn: Callable[[Batch], Any], batch: Batch, run: TrainRun) -> Any:
    """What `fn` gives for each micro-batch, added up."""
    if run.accumulate == 1:
        return fn(batch)
    micro = jax.tree.map(lambda rows: rows.reshape(run.accumulate, -1, *rows.shape[1:]), batch)
    is_seen = lambda node: isinstance(node, Seen)  # noqa: E731

    def nothing(shapes: Any) -> Any:
        fill = lambda tree, value: jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), tree)  # noqa: E731
        if is_seen(shapes):
            return Seen(fill(shapes.sums, 0), fill(shapes.counts, 0), fill(shapes.max_logits, -jnp.inf))
        return fill(shapes, 0)

    def add(total: Any, rows: Batch) -> tuple[Any, None]:
        return jax.tree.map(lambda a, b: a + b, total, fn(rows), is_leaf=is_seen), None

    zeros = jax.tree.map(nothing, jax.eval_shape(fn, jax.tree.map(lambda rows: rows[0], micro)), is_leaf=is_seen)
    return jax.lax.scan(add, zeros, micro)[0]


def make_eval_step(run: TrainRun, rest: Transformer) -> Callable[[TrainState, Batch], tuple[Any, Any]]:
    """`eval_step(state, batch) -> (summed nats, tokens)`, to be jitted."""

    def eval_step(state: TrainState, batch: Batch) -> tuple[Any, Any]:
        model = _quantized(model_of(state, rest), run)
        rows = batch.tokens, batch.targets, batch.segment_ids, batch.loss_mask
        return total(batch_loss(model, *rows, chunk=run.loss_chunk, features=_features(model, batch)), *TOKENS)

    return eval_step


def _of_copies(grad: Any) -> Any:
    """A weight's gradient, from those that devices with equal copies of it found."""
    return (
        grad
        if not is_variable(grad) or grad.get_value() is None
        else grad.replace(total_of_copies(grad.get_value(), grad.axes))
    )


def _quantized(model: Transformer, run: TrainRun) -> Transformer:
    """What the forward pass runs: under QAT with experts as they will be served."""
    return fake_quantize_experts(model) if run.qat else model


def _features(model: Transformer, batch: Batch) -> Float[Array, "B N D"] | None:
    """Of the images in each row, where the batch has any; the tower learns from the loss of the texts alone."""
    if batch.patches is None:
        return None
    assert model.vision is not None
    assert batch.grids is not None
    return model.vision(batch.patches, batch.grids)[0]


def _watched_loss(model: Transformer, batch: Batch, run: TrainRun) -> tuple[Float[Array, ""], Seen]:
    """(the objective summed over tokens, what was seen)."""
    features = _features(model, batch)
    out = model.hidden(batch.tokens, segment_ids=batch.segment_ids, features=features, watch=WATCH)
    head = head_sums(model, out.hidden, batch.targets, batch.loss_mask, chunk=run.loss_chunk)
    objective, watched = head.nats + run.z_loss * head.squares, dict(out.watched)
    sums = {"nats": head.nats, "tokens": head.tokens}
    if run.mtp_weight > 0:
        nats, tokens, watched["mtp"] = _mtp_loss(model, out.hidden, batch, run)
        objective += run.mtp_weight * nats
        sums |= {"mtp_nats": nats, "mtp_tokens": tokens}
    by_name = {name: {kind: seen[name] for kind, seen in watched.items() if name in seen} for name in WATCH}
    return objective, Seen(sums, by_name["router"], by_name["max_logit"])


def _mtp_loss(model: Transformer, hidden: Float[Array, "B T D"], batch: Batch, run: TrainRun) -> tuple[Any, Any, Any]:
    """Summed nats of the tokens after the next and their number, and what the layer shows.

    The last token of a row has no such target, nor has one whose next token begins another document.
    """
    later = lambda rows: jnp.concatenate([rows[:, 1:], rows[:, -1:]], axis=1)  # noqa: E731
    is_last = jnp.arange(hidden.shape[1]) == hidden.shape[1] - 1
    same: Bool[Array, "B T"] = batch.segment_ids == later(batch.segment_ids)
    mask = batch.loss_mask & later(batch.loss_mask) & same & ~is_last
    hidden, shown = model.next_but_one(hidden, batch.targets, segment_ids=batch.segment_ids, watch=WATCH)
    nats, tokens = head_loss(model, hidden, later(batch.targets), mask, chunk=run.loss_chunk)
    return nats, tokens, {name: shown[name] for name in WATCH}


def _more_metrics(seen: Seen) -> Metrics:
    metrics: Metrics = {f"expert_rows/{kind}": counts.load for kind, counts in seen.counts.items()}
    if seen.max_logits:
        most = jnp.stack([jnp.max(logits) for logits in seen.max_logits.values()])
        metrics["max_logit"] = largest_anywhere(jnp.max(most))
    if "mtp_nats" in seen.sums:
        metrics["mtp_loss"] = seen.sums["mtp_nats"] / jnp.maximum(seen.sums["mtp_tokens"], 1.0)
    return metrics
