"""A training run: the same step on a mesh with Crossdock, or on one device without."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from moe_lm.progress import Progress

from .model import Layers, Params, cross_entropy, init_params, predict
from .settings import Settings

_MOMENTS = (0.9, 0.95)  # decay rates of AdamW's moments
_WEIGHT_DECAY = 0.01

Batch = tuple[np.ndarray, np.ndarray]


class Trainer:
    """Trains one model; all processes of a mesh make one and call the same methods in one order.

    On a mesh each rank has its part of the batch, along both axes; experts lie along "expert", and
    with tensor parallelism the weights of attention, too. All other parameters are everywhere. XLA
    adds up the gradients of what lies in several places.
    """

    def __init__(
        self, settings: Settings, title: str, layers: Layers, mesh: Mesh | None = None
    ) -> None:
        """``mesh``: with axes "data" and "expert"; None = one device."""
        self.settings = settings
        self.title = title
        self.records: list[dict[str, Any]] = []
        self._batches, self._shardings = _shardings(mesh, settings.tensor_parallel)
        params = jax.tree.map(np.asarray, jax.jit(init_params, static_argnums=0)(settings))
        self.params = self._place(params)
        self._moments = tuple(self._place(jax.tree.map(np.zeros_like, params)) for _ in range(2))
        self.loss_and_gradients = jax.jit(functools.partial(_loss_and_gradients, settings, layers))
        self._update = jax.jit(functools.partial(_updated, settings), donate_argnums=(0, 1))

    def train(self, text: bytes, show: bool) -> None:
        """Trains to the last step. ``show``: prints progress, and logs to the run's folder."""
        s = self.settings
        data = np.frombuffer(text, np.uint8)
        if not show:
            for step in range(s.steps):
                self._train_step(data, step)
            return
        s.folder.mkdir(parents=True, exist_ok=True)
        log_file = s.folder / "log.jsonl"
        with log_file.open("w") as log, Progress(self.title, s.steps, 0) as progress:
            for step in range(s.steps):
                self._train_step(data, step)
                print(json.dumps(self.records[-1]), file=log, flush=True)
                progress.show(self.records[-1])

    def batch(self, data: np.ndarray, step: int) -> tuple[jax.Array, jax.Array]:
        """Inputs and targets of a step, ``[sequences, context]`` int32, where they belong."""
        s = self.settings
        starts = np.random.default_rng((s.seed, step)).integers(
            data.size - s.context - 1, size=s.sequences
        )
        windows = data[starts[:, None] + np.arange(s.context + 1)].astype(np.int32)
        return tuple(_placed(part, self._batches) for part in (windows[:, :-1], windows[:, 1:]))

    def _train_step(self, data: np.ndarray, step: int) -> None:
        s = self.settings
        start = time.perf_counter()
        (_, (losses, load)), gradients = self.loss_and_gradients(
            self.params, *self.batch(data, step)
        )
        self.params, self._moments = self._update(
            self.params, self._moments, gradients, jnp.int32(step)
        )
        loss, aux_loss = np.asarray(losses).tolist()
        self.records.append(
            {
                "step": step,
                "loss": loss,
                "aux_loss": aux_loss,
                "load": np.asarray(load).tolist(),
                "seconds": time.perf_counter() - start,
                "tokens": s.sequences * s.context,
            }
        )

    def _place(self, tree: Params) -> Params:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: _placed(leaf, self._shardings(path)), tree
        )


def _shardings(
    mesh: Mesh | None, tensor_parallel: bool
) -> tuple[Any, Callable[[tuple[Any, ...]], Any]]:
    """The shardings of batches, and of a parameter by its path."""
    if mesh is None:
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return one, lambda path: one
    places = {"experts_in": P(None, "expert"), "experts_out": P(None, "expert")}
    if tensor_parallel:  # columns and rows of weights [layers, K, N]
        places |= {"qkv": P(None, None, "expert"), "out": P(None, "expert")}
    batches = P("data", "expert") if tensor_parallel else P(("data", "expert"))
    return NamedSharding(mesh, batches), lambda path: NamedSharding(
        mesh, places.get(str(path[-1].key), P())
    )


def _placed(host: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    # Each process has the whole array, and puts the parts of its own devices there.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _loss_and_gradients(
    s: Settings, layers: Layers, params: Params, inputs: jax.Array, targets: jax.Array
) -> tuple[tuple[jax.Array, tuple[jax.Array, jax.Array]], Params]:
    """((loss, (losses [2] without and of the auxiliary one, load [layers, E])), gradients)."""

    def loss(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        prediction = predict(params, inputs, s.heads, layers)
        entropy = cross_entropy(prediction.logits, targets)
        losses = jnp.stack((entropy, prediction.aux_loss))
        return losses.sum(), (losses, prediction.load)

    return jax.value_and_grad(loss, has_aux=True)(params)


def _updated(
    s: Settings,
    params: Params,
    moments: tuple[Params, Params],
    gradients: Params,
    step: jax.Array,
) -> tuple[Params, tuple[Params, Params]]:
    """Parameters and moments after a step of AdamW."""
    rate = s.learning_rate * jnp.minimum(1.0, (step + 1) / s.warmup)  # up in a line, then down
    rate *= 0.55 + 0.45 * jnp.cos(math.pi * step / s.steps)  # to a tenth
    first, second = _MOMENTS

    mean = jax.tree.map(lambda m, g: first * m + (1 - first) * g, moments[0], gradients)
    square = jax.tree.map(lambda v, g: second * v + (1 - second) * g * g, moments[1], gradients)

    def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        m, v = m / (1 - first ** (step + 1)), v / (1 - second ** (step + 1))
        return p - rate * (m / (jnp.sqrt(v) + 1e-8) + _WEIGHT_DECAY * p)

    return jax.tree.map(moved, params, mean, square), (mean, square)
