"""Spread matrices of small whole numbers, and what one process without ranks makes of them."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from crossdock.torch import tp
from support import Rank
from torch_support import where

# Tokens of each rank, by how many ranks there are.
RAGGED = {4: (5, 0, 9, 1), 3: (4, 0, 3), 2: (9, 1), 1: (9,)}


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """-1, 0 and 1, of which sums of a hundred are exact in bfloat16."""
    numbers = np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)
    return torch.from_numpy(numbers).to(where(), dtype)


def rows_of(tokens: tuple[int, ...], rank: int) -> slice:
    first = sum(tokens[:rank])
    return slice(first, first + tokens[rank])


def context(tokens: tuple[int, ...], columns: int, dtype: torch.dtype, **options) -> tp.TpContext:
    return tp.TpContext(
        max_tokens=max(1, *tokens), max_k=columns, max_n=columns, dtype=dtype, **options
    )


def act(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    return F.relu(x) if activation == "relu" else x


class Spread:
    """x of all ranks, a weight and a bias of each, and the gradient of the result.

    Each rank computes all of it; `leaves` are this rank's parts, which require gradients.
    """

    def __init__(
        self,
        me: Rank,
        operation: str,
        *,
        tokens: tuple[int, ...] | None = None,
        k: int = 16,
        n: int = 8,
        dtype: torch.dtype = torch.float32,
        seed: int = 7,
        activation: str | None = None,
        bias: bool = True,
        factors: tuple[float, ...] = (1,),
    ) -> None:
        """Factors are of x of one rank after another, from the first again after the last."""
        self.me, self.operation, self.activation = me, operation, activation
        self.tokens = RAGGED[me.num_ranks] if tokens is None else tokens
        self.own = rows_of(self.tokens, me.rank)
        rows, ranks = sum(self.tokens), range(me.num_ranks)
        gathers = operation == "all_gather"
        # Gathered rows are of all ranks; else each rank has columns of all rows.
        self.x = [whole(seed, rows, k)] if gathers else [whole(seed + r, rows, k) for r in ranks]
        for r in ranks:
            part = self.x[0][rows_of(self.tokens, r)] if gathers else self.x[r]
            part.mul_(factors[r % len(factors)])
        self.weights = [whole(seed + 10 + r, n, k) for r in ranks]
        # Before a sum over ranks the bias is each rank's own, after it all ranks have the same.
        self.biases = [whole(seed + 20 + (r if gathers else 0), n) for r in ranks]
        self.grads = [whole(seed + 30 + (r if gathers else 0), rows, n) for r in ranks]
        mine = self.x[0][self.own] if gathers else self.x[me.rank]
        self.leaves = [
            part.to(dtype).clone().requires_grad_()
            for part in (mine, self.weights[me.rank], self.biases[me.rank])
        ]
        self.bias = bias
        grad = self.grads[me.rank]
        self.grad = (grad[self.own] if operation == "reduce_scatter" else grad).to(dtype)

    def __iter__(self):
        """x, weight, bias or None."""
        x, weight, bias = self.leaves
        return iter((x, weight, bias if self.bias else None))

    def expected(self) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """This rank's result, and the gradients of its x, weight and bias, by one process."""
        gathers, rank = self.operation == "all_gather", self.me.rank
        x = [part.clone().requires_grad_() for part in self.x]
        weights = [part.clone().requires_grad_() for part in self.weights]
        biases = [part.clone().requires_grad_() for part in self.biases]
        if gathers:
            outs = [
                act(F.linear(x[0], w, b if self.bias else None), self.activation)
                for w, b in zip(weights, biases)
            ]
            torch.autograd.backward(outs, self.grads)
            out, grad_x, grad_bias = outs[rank], x[0].grad[self.own], biases[rank].grad
        else:
            total = sum(F.linear(part, w) for part, w in zip(x, weights))
            out = act(total + biases[0] if self.bias else total, self.activation)
            out.backward(self.grads[0])
            grad_x, grad_bias = x[rank].grad, biases[0].grad
            if self.operation == "reduce_scatter":
                out = out[self.own]
        return out.detach(), [grad_x, weights[rank].grad, grad_bias if self.bias else None]

    def check(self, out: torch.Tensor, what: str = "") -> None:
        """Compares a result, and the gradients that `leaves` have after its backward pass."""
        want, grads = self.expected()
        equal(f"result {what}", out, want)
        for name, leaf, grad in zip(("x", "weight", "bias"), self.leaves, grads):
            if grad is not None and leaf.requires_grad:
                assert leaf.grad is not None, f"{name} has no gradient {what}"
                equal(f"gradient of {name} {what}", leaf.grad, grad)
                leaf.grad = None


def equal(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares every element, exactly."""
    assert got.shape == want.shape, f"{name}: got shape {got.shape}, want {want.shape}"
    wrong = (got.detach().double() != want.double()).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{name}: {len(wrong)} of {want.numel()} elements differ, first at {at}: "
            f"expected {want[at]}, got {got[at]}"
        )
