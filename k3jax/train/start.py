"""The state that a run starts from: new, from another model's weights, or as an earlier process left it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import k3jax
from k3jax.checkpoint.orbax_io import DATA, OPTIMIZER, WEIGHTS, Checkpoints, named_leaves, with_leaves
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.config import ConfigError, ModelConfig, TrainRun
from k3jax.nn.param import Param, is_trainable, is_variable, split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.devices import Devices
from k3jax.train.lora import ADAPTERS, Adapter, make_adapters
from k3jax.train.optimizer import Optimizer, make_optimizer
from k3jax.train.run_dir import flat
from k3jax.train.step import TrainState, init_state, model_of

MTP = "mtp"  # in a checkpoint's optimizer tree: the layer of multi-token prediction, which the release has not


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is made of before it has any numbers: optimizer, the part of its model that nothing changes, the
    shapes of its state, and the devices that the state lies on.
    """

    optimizer: Optimizer
    rest: Transformer
    blank: TrainState
    devices: Devices

    @classmethod
    def of(cls, run: TrainRun, devices: list[Any] | None = None) -> Setting:
        """On all devices, or on those given, which need not be present; raises `ConfigError`."""
        skeleton = jax.eval_shape(lambda: _random_model(run))
        params, _, rest = split_model(skeleton)
        trained = jax.eval_shape(lambda: _adapters(run, skeleton)) or params
        optimizer = make_optimizer(run.optimizer, trained, steps=run.steps, dtype=run.model.dtype)
        blank = jax.eval_shape(lambda: init_state(_random_model(run), optimizer, adapters=_adapters(run, skeleton)))
        return cls(optimizer=optimizer, rest=rest, blank=blank, devices=Devices.of(run.mesh, blank, devices))


@dataclass(frozen=True, kw_only=True)
class Start:
    """A state, the updates it has seen, and the position in the data after them; None at the start of a run."""

    state: TrainState
    step: int = 0
    position: Any = None


def start_state(run: TrainRun, setting: Setting, checkpoints: Checkpoints) -> Start:
    """Where `run` starts or continues; raises `ConfigError`."""
    devices, optimizer = setting.devices, setting.optimizer
    found = checkpoints.restore(like=_blank_trees(setting), records=(DATA,))
    if found is not None:
        state = _state_of(found.trees, run, setting)
        return Start(state=state, step=found.step, position=found.records[DATA]["position"])
    if run.init_from:
        model = _loaded_model(run)
        return Start(state=devices.put_state(init_state(model, optimizer, adapters=_adapters(run, model))))

    def create() -> TrainState:
        model = _random_model(run)
        return init_state(model, optimizer, adapters=_adapters(run, model))

    return Start(state=devices.create(create))


def trees_of(state: TrainState, rest: Transformer) -> dict[str, Any]:
    """A state as the trees of a checkpoint: the model by itself, as serving loads it, and what only training needs."""
    model, mtp = model_of(state, rest).split_mtp()
    training = {"step": state.step, "opt_state": state.opt_state}
    if mtp is not None:
        training[MTP] = mtp
    if state.frozen is not None:
        training[ADAPTERS] = state.params
    return {WEIGHTS: model, OPTIMIZER: training}


def _blank_trees(setting: Setting) -> dict[str, Any]:
    """`trees_of` of shapes, each with its place."""
    blank, devices = setting.devices.blank(setting.blank), setting.devices
    trees = trees_of(dataclasses.replace(blank, params=blank.frozen or blank.params, frozen=None), setting.rest)
    if blank.frozen is not None:
        trees[OPTIMIZER][ADAPTERS] = blank.params
    return {**trees, WEIGHTS: devices.placed(trees[WEIGHTS])}


def _state_of(trees: dict[str, Any], run: TrainRun, setting: Setting) -> TrainState:
    """The inverse of `trees_of`; under adapters the weights below them are those that the run began with."""
    training = dict(trees[OPTIMIZER])
    adapters, mtp = training.pop(ADAPTERS, None), training.pop(MTP, None)
    params, router_bias, _ = split_model(trees[WEIGHTS].with_mtp(mtp))
    blank = setting.blank
    if adapters is None:
        return dataclasses.replace(blank, params=params, router_bias=router_bias, **training)
    frozen, _, _ = split_model(_loaded_model(run) if run.init_from else jax.jit(lambda: _random_model(run))())
    state = dataclasses.replace(blank, params=adapters, frozen=frozen, router_bias=router_bias, **training)
    return setting.devices.put_state(state)


def _adapters(run: TrainRun, model: Transformer) -> dict[str, Adapter] | None:
    if not run.lora.rank:
        return None
    return make_adapters(model, run.lora, jax.random.fold_in(jax.random.key(run.seed), 1))


def _random_model(run: TrainRun) -> Transformer:
    return Transformer(
        run.model,
        jax.random.key(run.seed),
        param_dtype="float32",
        stack=run.stack,
        remat=run.remat,
        with_mtp=run.mtp_weight > 0,
    )


def _loaded_model(run: TrainRun) -> Transformer:
    """The weights at `init_from` in float32, on the host."""
    try:
        loaded = k3jax.load(run.init_from)
    except CheckpointError as error:
        raise ConfigError(f"init_from = {error}") from error
    _check_same_model(loaded.config, run)
    if not all(is_trainable(leaf) for leaf in jax.tree.leaves(loaded, is_leaf=is_variable) if isinstance(leaf, Param)):
        raise ConfigError(f"init_from = {run.init_from}: its experts are MXFP4, which cannot be trained as they are")
    weights = {name: leaf.astype(np.float32) for name, leaf in named_leaves(loaded).items()}
    model = with_leaves(jax.eval_shape(lambda: _random_model(run)).with_mtp(None), weights)
    return model.with_mtp(jax.jit(lambda: _random_model(run).mtp)()) if run.mtp_weight > 0 else model


def _check_same_model(loaded: ModelConfig, run: TrainRun) -> None:
    free = {"name", "dtype", "max_context", "quantized_experts", "init_std", "vision_json", "extra_json"}
    free |= {"moe.activations"}
    ours, theirs = flat(dataclasses.asdict(run.model)), flat(dataclasses.asdict(loaded))
    for key in ours.keys() - free:
        if ours[key] != theirs.get(key):  # a model without vision has no vision.width
            found = theirs.get(key)
            raise ConfigError(f"model.{key} = {ours[key]}: the model at init_from = {run.init_from} has {found}")
