"""Weights as leaves of the model's pytree, and the split of a model into what is trained and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from sharding.local import total, whole, whole_matrix, whole_shape

Model = TypeVar("Model", bound=nnx.Module)


class Param(nnx.Param):
    """A weight. `axes` names the logical axis of each dim of the unstacked weight; stacking only prepends dims."""


class RouterBias(nnx.Variable):
    """The router's correction bias: chosen by balancing, never by gradients, so not a `Param`."""


def normal(key: PRNGKeyArray, shape: tuple[int, ...], axes: tuple[str, ...], *, std: float, dtype: Any) -> Param:
    """A weight of `shape` from a normal distribution of standard deviation `std`, cut at three deviations."""
    return Param((jax.random.truncated_normal(key, -3.0, 3.0, shape, jnp.float32) * std).astype(dtype), axes=axes)


def constant(value: float, shape: tuple[int, ...], axes: tuple[str, ...], *, dtype: Any) -> Param:
    """A weight of `shape` filled with `value`."""
    return Param(jnp.full(shape, value, dtype), axes=axes)


def cast(variable: nnx.Variable, dtype: Any) -> Float[Array, "..."]:
    """The variable's array in the compute dtype, whole wherever it is only stored in parts."""
    return whole(variable.get_value().astype(dtype), variable.axes)


def is_variable(node: Any) -> bool:
    """Whether a pytree node is a Flax variable; the `is_leaf` of every walk over a model."""
    return isinstance(node, nnx.Variable)


def is_trainable(variable: nnx.Variable) -> bool:
    """Whether a gradient exists for it: a `Param` that holds one floating-point array (not an MXFP4 leaf)."""
    value = variable.get_value()
    return isinstance(variable, Param) and jnp.issubdtype(getattr(value, "dtype", jnp.uint8), jnp.floating)


def select(model: Model, keep: Callable[[nnx.Variable], bool]) -> Model:
    """A tree shaped like `model` whose variables hold None unless `keep(variable)`."""
    return jax.tree.map(lambda v: v if keep(v) else v.replace(None), model, is_leaf=is_variable)


def split_model(model: Model) -> tuple[Model, Model, Model]:
    """Split into (trainable Params, router biases, everything else), each shaped like the model with None elsewhere."""
    return (
        select(model, is_trainable),
        select(model, lambda v: isinstance(v, RouterBias)),
        select(model, lambda v: not is_trainable(v) and not isinstance(v, RouterBias)),
    )


def merge_model(*parts: Model) -> Model:
    """Undo `split_model`: for each variable take the one part that holds a value."""

    def first(*variables: nnx.Variable) -> nnx.Variable:
        return next((v for v in variables if v.get_value() is not None), variables[0])

    return jax.tree.map(first, *parts, is_leaf=is_variable)


def value_and_grad(fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """`jax.value_and_grad` for the model in the first argument.

    The returned function gives (value, gradients); the gradients are shaped like the model and hold None for whatever
    is not a floating-point `Param`.
    """

    def wrapped(model: Model, *args: Any, **kwargs: Any) -> tuple[Any, Model]:
        params, *rest = split_model(model)

        def of_params(params: Model) -> Any:
            return fn(merge_model(params, *rest), *args, **kwargs)

        return jax.value_and_grad(of_params, has_aux=has_aux)(params)

    return wrapped


def island(dtype: Any) -> jnp.dtype:
    """The dtype of a float32 island inside a computation of `dtype`: float32, or float64 in float64 tests."""
    return jnp.promote_types(jnp.float32, dtype)


def working_copy(params: Model, dtype: Any) -> Model:
    """`params` with the matrices that the computation rounds to `dtype` rounded now, once for all of a step's uses.

    What layers keep and gather is then half as large. The router reads its weight in float32, as it does every vector.
    """

    def one(variable: nnx.Variable) -> nnx.Variable:
        value, wide = variable.get_value(), len(variable.axes) < 2 or variable.axes in _KEPT_WIDE
        return variable if value is None or wide else variable.replace(value.astype(dtype))

    return jax.tree.map(one, params, is_leaf=is_variable)


_KEPT_WIDE = {("embed", "expert_scores"), ("kda_heads", "head_dim"), ("kda_heads", "head_dim", "conv")}


def matmul_precision(dtype: Any) -> jax.lax.Precision | None:
    """Full float32 for a float32 computation, where accelerators would round operands to TF32 or bfloat16."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else None


def project(x: Float[Array, "..."], weight: nnx.Variable, *, dims: int = 1) -> Float[Array, "..."]:
    """Contract the last `dims` dims of `x` with the first of a weight cast to x's dtype; sums over all of a mesh."""
    return total(partial_product(x, weight, dims=dims), *weight.axes[:dims])


def partial_product(x: Float[Array, "..."], weight: nnx.Variable, *, dims: int = 1) -> Float[Array, "..."]:
    """`project` before the sum over devices that have other parts of the contracted dims.

    Written as one matrix product: the gradients of a product of more dims transpose whole activations on a CPU.
    """
    matrix = whole_matrix(weight.get_value().astype(x.dtype), weight.axes, rows=dims)
    product = jnp.matmul(x.reshape(-1, len(matrix)), matrix, precision=matmul_precision(x.dtype))
    outputs = whole_shape(weight.get_value().shape, weight.axes)[dims:]
    return product.reshape(*x.shape[: x.ndim - dims], *outputs)
