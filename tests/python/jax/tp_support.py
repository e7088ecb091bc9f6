"""Products of whole arrays for the tests of crossdock.jax.tp: layers, and what they must give."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from crossdock.jax import tp
from jax_support import RANKS
from programs import all_same, compiled, placed, spelled, with_gradients

SEED = 1515
K, N = 32, 64  # of the whole layer


@contextlib.contextmanager
def joined(data: int = 1, ranks: int = RANKS) -> Iterator[tp.TpMesh]:
    """`data` sets of ranks; the mesh has an axis of data if there are several."""
    devices = np.array(jax.devices()[:ranks])
    if data == 1:
        mesh = tp.init(Mesh(devices, ("tp",)), "tp")
    else:
        mesh = tp.init(Mesh(devices.reshape(data, -1), ("data", "tp")), "tp", data_axes="data")
    try:
        yield mesh
    finally:
        mesh.close()


@dataclasses.dataclass(frozen=True)
class Layer:
    """One product of whole arrays, and how they lie on a mesh."""

    operation: str
    tokens: tuple[int, ...] = (4 * RANKS,)
    dim: int = 0
    dtype: str = "float32"
    transpose_b: bool = False
    activation: str | None = None
    bias: str | None = None  # its dtype
    options: tuple[tuple[str, Any], ...] = ()
    counts: tuple[int, ...] | None = None  # tokens of each rank, where they differ
    k: int = K
    spread: bool = False  # numbers of one rank are larger than another's, and so are their scales

    @property
    def gathers(self) -> bool:
        return self.operation == "all_gather_matmul"

    def specs(self, data: tuple[str, ...] = ()) -> tuple[dict[str, P], P]:
        """Of the arrays by name, and of the result."""
        gathers, ndim = self.gathers, len(self.tokens) + 1

        def tokens(split: bool, features: bool) -> P:
            axes: list[tuple[str, ...]] = [()] * ndim
            axes[0] = data
            axes[self.dim] += ("tp",) if split else ()
            axes[-1] = ("tp",) if features else ()
            return P(*(names or None for names in axes))

        specs = {
            "a": tokens(gathers, not gathers),
            "b": P(None, "tp") if gathers != self.transpose_b else P("tp", None),
        }
        if self.bias:
            specs["bias"] = P("tp") if gathers else P()
        return specs, tokens(self.operation == "matmul_reduce_scatter", gathers)

    def whole(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Small whole numbers, of which every sum is exact; and the gradient of the result."""
        rng = np.random.default_rng(SEED)

        def whole(shape: tuple[int, ...], dtype: str) -> np.ndarray:
            most = 1 if self.spread else 2
            return rng.integers(-most, most + 1, shape).astype(jnp.dtype(dtype))

        arrays = {
            "a": whole((*self.tokens, self.k), self.dtype),
            "b": whole((N, self.k) if self.transpose_b else (self.k, N), self.dtype),
        }
        if self.bias:
            arrays["bias"] = whole((N,), self.bias)
        if self.spread:
            arrays |= self._spread(arrays["a"], arrays["b"])
        return arrays, whole((*self.tokens, N), self.dtype)

    def _spread(self, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
        """The same with the part of each rank multiplied by a power of two of its own."""
        factors = 2.0 ** (np.arange(RANKS) - 1)
        counts = self.counts or (self.tokens[0] // RANKS,) * RANKS
        inner = factors.repeat(self.k // RANKS)
        of_a = factors.repeat(counts)[:, None] if self.gathers else inner
        of_b = 2 * (factors.repeat(N // RANKS)[None] if self.gathers else inner[:, None])
        of_b = of_b.T if self.transpose_b else of_b
        return {"a": (a * of_a).astype(a.dtype), "b": (b * of_b).astype(b.dtype)}

    def arrays(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The same as ranks have them: behind fewer tokens than the most stands no number."""
        arrays, grad = self.whole()
        if self.counts and self.gathers:
            arrays["a"] = padded(self.counts, arrays["a"], np.nan)
        elif self.counts:
            grad = padded(self.counts, grad, np.nan)
        return arrays, grad

    def expected(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The result and the gradients, computed in float64."""
        arrays, grad = self.whole()
        dtypes = {name: array.dtype for name, array in arrays.items()}
        wide = {name: array.astype(np.float64) for name, array in arrays.items()}
        a, grad = wide["a"], grad.astype(np.float64)
        b = wide["b"].T if self.transpose_b else wide["b"]
        out = a @ b + wide.get("bias", 0)
        if self.activation == "relu":
            grad = np.where(out > 0, grad, 0)
            out = np.maximum(out, 0)
        rows = a.reshape(-1, self.k), grad.reshape(-1, N)
        of_b = rows[0].T @ rows[1]
        grads = {"a": grad @ b.T, "b": of_b.T if self.transpose_b else of_b}
        if self.bias:
            grads["bias"] = rows[1].sum(0)
        if self.counts and self.gathers:
            grads["a"] = padded(self.counts, grads["a"], 0)
        elif self.counts:
            out = padded(self.counts, out, 0)
        return out.astype(self.dtype), {k: g.astype(dtypes[k]) for k, g in grads.items()}

    def run(self, **arrays: jax.Array) -> jax.Array:
        """The product, on whole arrays or on one rank's."""
        dim = {
            "all_gather_matmul": {"gather_dim": self.dim, "tokens_per_rank": self.counts},
            "matmul_reduce_scatter": {"scatter_dim": self.dim, "tokens_per_rank": self.counts},
        }.get(self.operation, {})
        return getattr(tp, self.operation)(
            **arrays,
            **dim,
            **dict(self.options),
            transpose_b=self.transpose_b,
            activation=self.activation,
        ).out


def trained(mesh: tp.TpMesh, layer: Layer, spelling: str) -> tuple[Callable[..., Any], list[Any]]:
    """A function that returns the result and the gradients, and its arguments on the mesh."""
    specs, out = layer.specs(mesh.place.data_axes)
    arrays, grad = layer.arrays()
    function = lambda *given: layer.run(**dict(zip(specs, given)))  # noqa: E731
    function = spelled(mesh, spelling, function, tuple(specs.values()), out)
    args = placed(mesh, (grad, *arrays.values()), (out, *specs.values()))
    return with_gradients(function), args


def padded(counts: tuple[int, ...], rows: np.ndarray, value: float) -> np.ndarray:
    """The tokens of each rank, and behind them this value, as many as the most of them."""
    parts = np.split(rows, np.cumsum(counts)[:-1])
    found = np.full((len(parts), max(counts), *rows.shape[1:]), value, rows.dtype)
    for of_rank, part in zip(found, parts):
        of_rank[: len(part)] = part
    return found.reshape(-1, *rows.shape[1:])


CHAINS = {
    "all_gather_matmul": ["all_gather", "reduce_scatter"],
    "matmul_reduce_scatter": ["reduce_scatter", "all_gather"],
    "matmul_all_reduce": ["all_reduce"],
}


AGAIN, AGAIN_CHAIN = (("save_gathered", False),), ["all_gather", "bulk", "bulk"]


def check(mesh: tp.TpMesh, layer: Layer, spelling: str) -> None:
    """The result and all gradients are exact; no collective but ours computes them, in one order.

    With an axis of data XLA sums the gradients of weights over it.
    """
    step, args = trained(mesh, layer, spelling)
    if not mesh.place.data_axes and mesh.num_ranks > 1:
        made_fp8 = ("fp8", True) in layer.options
        chain = AGAIN_CHAIN if AGAIN[0] in layer.options else CHAINS[layer.operation]
        step = compiled(step, args, None if made_fp8 else chain)
        assert not made_fp8 or "f8e4m3fn" in step.as_text()
    out, grads = layer.expected()
    all_same(step(*args), (out, tuple(grads.values())))


LAYERS = [
    Layer("all_gather_matmul", dtype="bfloat16", activation="relu", bias="float32"),
    Layer("all_gather_matmul", (2, 4 * RANKS), 1, transpose_b=True, options=AGAIN),
    Layer("all_gather_matmul", activation="relu", bias="float32", options=AGAIN),
    Layer("matmul_reduce_scatter", dtype="bfloat16", activation="relu", bias="bfloat16"),
    Layer("matmul_reduce_scatter", (2, 2, 3 * RANKS), 2, transpose_b=True, bias="float32"),
    Layer("matmul_all_reduce", (7,), activation="relu", bias="float32"),
    Layer("matmul_all_reduce", (2, 3), dtype="float16", transpose_b=True),
]
