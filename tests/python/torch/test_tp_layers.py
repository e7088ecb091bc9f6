"""Linear layers whose weights are spread over the ranks, beside one process without ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crossdock.torch as xd
from crossdock.errors import Mismatch
from crossdock.torch import tp
from support import Rank, on_ranks
from torch_support import distributed, settle, where
from tp_support import RAGGED, context, equal, rows_of, whole

HIDDEN, INNER = 8, 32  # of all ranks


class Full:
    """An MLP of small whole numbers in one process, and the tokens of all ranks."""

    def __init__(self, rows: int, activation: type[nn.Module] = nn.ReLU) -> None:
        self.model = nn.Sequential(nn.Linear(HIDDEN, INNER), activation(), nn.Linear(INNER, HIDDEN))
        self.model.to(where())
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.copy_(whole(10 + number, *parameter.shape))
        self.x = whole(1, rows, HIDDEN).requires_grad_()
        self.grad = whole(2, rows, HIDDEN)
        self.out = self.model(self.x)
        self.out.backward(self.grad)

    def state(self) -> dict[str, torch.Tensor]:
        """For a SequenceParallelMLP: parameters of all ranks."""
        names = {"0": "linear_in", "2": "linear_out"}
        state = self.model.state_dict()
        return {names[key.split(".")[0]] + "." + key.split(".")[1]: state[key] for key in state}

    def check(self, mlp: tp.SequenceParallelMLP, weights: bool = True) -> None:
        """Compares the gradients of the parameters with those of one process."""
        for layer, reference in ((mlp.linear_in, self.model[0]), (mlp.linear_out, self.model[2])):
            for name, parameter in layer.named_parameters():
                if name == "weight" and not weights:
                    assert parameter.grad is None
                    continue
                want = layer.own_part(name, getattr(reference, name).grad)
                equal(f"gradient of {name}", parameter.grad, want)


def make_mlp(max_tokens: int, **options) -> tp.SequenceParallelMLP:
    given = {"activation": "relu", "dtype": torch.float32} | options
    return tp.SequenceParallelMLP(HIDDEN, INNER, max_tokens=max_tokens, **given)


def check_mlp(me: Rank, tokens: tuple[int, ...], compiled: bool, **options) -> tp.TpContext:
    """Compares an MLP's result and all its gradients; returns its context."""
    spread, fused = options.get("sequence_parallel", True), "fused_wgrad" in options
    full = Full(sum(tokens))
    mlp = make_mlp(max(tokens), **options)
    mlp.load_state_dict(full.state())
    for layer in (mlp.linear_in, mlp.linear_out) if fused else ():
        layer.weight.main_grad = torch.ones_like(layer.weight, requires_grad=False)
    own = rows_of(tokens, me.rank) if spread else slice(None)
    x = full.x[own].detach().clone().requires_grad_()
    call = torch.compile(mlp, fullgraph=True, backend="aot_eager") if compiled else mlp
    out = call(x, tokens)
    out.backward(full.grad[own])
    settle(mlp.context)
    equal(f"out, {options}", out, full.out[own])
    equal(f"gradient of x, {options}", x.grad, full.x.grad[own])
    full.check(mlp, weights=not fused)
    for layer, of in ((mlp.linear_in, full.model[0]), (mlp.linear_out, full.model[2])):
        if fused:
            want = layer.own_part("weight", of.weight.grad) + 1
            equal("main_grad", layer.weight.main_grad, want)
    assert mlp.linear_in.context is mlp.context
    return mlp.context


WAYS = ({}, {"sequence_parallel": False}, {"fused_wgrad": True})


@on_ranks(4)
def test_an_mlp_is_that_of_one_process_exactly(me: Rank) -> None:
    with xd.init():
        for options in (*WAYS, {"save_gathered": False}):
            context = check_mlp(me, RAGGED[me.num_ranks], compiled=False, **options)
        # Layers of the same sizes share a context.
        assert make_mlp(1).context is context


@on_ranks(2, timeout=200)
def test_layers_compile(me: Rank) -> None:
    torch._dynamo.reset()
    with xd.init():
        for options in WAYS:
            check_mlp(me, (5, 2)[: me.num_ranks], compiled=True, **options)


@on_ranks(1, 2)
def test_a_seed_makes_the_same_layer_on_any_number_of_ranks(me: Rank) -> None:
    """The seed decides, not the number of ranks; on one rank all bits are an nn.Linear's."""
    with xd.init() as comm:
        for kind in (tp.ColumnParallelLinear, tp.RowParallelLinear):
            for dtype in (torch.float32, torch.bfloat16):
                torch.manual_seed(5)
                mine = kind(16, 32, max_tokens=12, dtype=dtype)
                after = torch.rand(1, device="cpu")
                torch.manual_seed(5)
                reference = nn.Linear(16, 32, dtype=dtype, device="cpu")
                assert torch.equal(after, torch.rand(1, device="cpu"))
                reference.to(comm.device)
                for name, parameter in reference.named_parameters():
                    part = mine.own_part(name, parameter.detach())
                    assert torch.equal(getattr(mine, name), part)
                if me.num_ranks > 1:
                    continue
                x = torch.randn(3, 4, 16, device=comm.device).to(dtype)
                grads = []
                for layer in (mine, reference):
                    leaf = x.clone().requires_grad_()
                    out = layer(leaf)
                    grad = torch.autograd.grad(out.square().sum(), (leaf, *layer.parameters()))
                    grads.append((out, *grad))
                assert all(map(torch.equal, *grads))
        assert "out_features=32" in repr(mine)


@on_ranks(2)
def test_attention_and_a_gated_mlp_are_those_of_one_process(me: Rank) -> None:
    """Grouped-query attention with its heads spread, and a gated MLP, beside one process."""
    tokens, batch, hidden, heads, kv_heads, dim = 3, 2, 16, 8, 4, 4
    rows = slice(me.rank * tokens, (me.rank + 1) * tokens)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Of ``[tokens, batch, heads, dim]``, as many heads as there are."""
        parts = [part.permute(1, 2, 0, 3) for part in (q, k, v)]
        repeats = parts[0].shape[1] // parts[1].shape[1]
        keys, values = (part.repeat_interleave(repeats, 1) for part in parts[1:])
        done = F.scaled_dot_product_attention(parts[0], keys, values, is_causal=True)
        return done.permute(2, 0, 1, 3)

    with xd.init() as comm:
        torch.manual_seed(3)
        projections = tp.TensorParallelAttentionProjections(
            hidden,
            heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            max_tokens=tokens * batch,
            dtype=torch.float32,
        )
        mlp = tp.SequenceParallelMLP(
            hidden, 24, activation="swiglu", max_tokens=tokens * batch, dtype=torch.float32
        )
        torch.manual_seed(3)
        qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * dim, bias=False, device="cpu")
        out = nn.Linear(heads * dim, hidden, bias=False, device="cpu")
        gates = nn.Linear(hidden, 48, device="cpu")
        down = nn.Linear(24, hidden, device="cpu")
        for module in (qkv, out, gates, down):
            module.to(comm.device)
        x = torch.randn(tokens * me.num_ranks, batch, hidden, device="cpu").to(comm.device)

        full = x.clone().requires_grad_()
        both = qkv(full).unflatten(-1, (kv_heads, heads // kv_heads + 2, dim))
        q, k, v = both.split((heads // kv_heads, 1, 1), dim=-2)
        want = out(attend(q.flatten(2, 3), k.squeeze(3), v.squeeze(3)).flatten(2))
        gate, up = gates(want).unflatten(-1, (-1, 2)).unbind(-1)
        want = want + down(F.silu(gate) * up)
        want.square().sum().backward()

        own = x[rows].clone().requires_grad_()
        got = projections.out(attend(*projections.qkv(own)))
        got = got + mlp(got)
        got.square().sum().backward()
        settle(mlp.context)
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(got, want[rows], **close)
        torch.testing.assert_close(own.grad, full.grad[rows], **close)
        for layer, reference in (
            (projections.linear_qkv, qkv),
            (projections.linear_out, out),
            (mlp.linear_in, gates),
            (mlp.linear_out, down),
        ):
            for name, parameter in layer.named_parameters():
                part = layer.own_part(name, getattr(reference, name).grad)
                torch.testing.assert_close(parameter.grad, part, **close)


@on_ranks(2)
def test_parameters_are_dtensors_over_torch_distributed(me: Rank) -> None:
    """Parameters are DTensors: norms, optimisers and full values are those of one process."""
    with distributed(), xd.init(device=where()):
        full = Full(4 * me.num_ranks)
        mlp = make_mlp(4)
        mlp.load_state_dict(full.state())
        own = rows_of((4,) * me.num_ranks, me.rank)
        out = mlp(full.x[own].detach())
        equal("out", out, full.out[own])
        out.backward(full.grad[own])
        kinds = (mlp.linear_in.weight, mlp.linear_in.bias, mlp.linear_out.weight)
        if me.num_ranks > 1:
            for parameter in kinds:
                assert [str(p) for p in parameter.placements] in (["S(0)"], ["S(1)"])
            equal("weight", mlp.linear_out.weight.full_tensor(), full.model[2].weight)
            equal("grad", mlp.linear_out.weight.grad.full_tensor(), full.model[2].weight.grad)
        assert not hasattr(mlp.linear_out.bias, "placements")
        grad = full.model[2].bias.grad
        equal("gradient of the bias, of all tokens", mlp.linear_out.bias.grad, grad)
        for parameters in (kinds, full.model.parameters()):
            torch.optim.SGD(list(parameters), lr=0.5).step()
        part = mlp.linear_in.own_part("weight", full.model[0].weight.detach())
        equal("step", xd.local_tensor(mlp.linear_in.weight), part)
        again = make_mlp(4)
        again.load_state_dict(mlp.state_dict())
        equal("loaded", xd.local_tensor(again.linear_in.weight), part)


@on_ranks(2)
def test_autocast_says_the_dtype(me: Rank) -> None:
    device = where().type
    with xd.init(), torch.autocast(device, torch.bfloat16):
        layer = tp.ColumnParallelLinear(16, 32, max_tokens=4, dtype=torch.float32)
        x = whole(1, 4, 16).requires_grad_()
        out = layer(x)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert layer.weight.grad.dtype == x.grad.dtype == torch.float32
        settle(layer.context)


@on_ranks(1, 2)
def test_max_tokens_is_the_bound_of_the_layer(me: Rank) -> None:
    """The context, which layers share, may have room for more."""
    with distributed(), xd.init(device=where()):
        wide = make_mlp(32)
        for options in ({}, {"sequence_parallel": False}, {"context": wide.context}):
            mlp = make_mlp(8, **options)
            assert mlp.context is wide.context
            all_of_them = 1 if "sequence_parallel" not in options else me.num_ranks
            mlp(whole(1, 8 * all_of_them, HIDDEN))
            mlp(whole(1, 2 * all_of_them, 4, HIDDEN))
            text = "x: expected at most the layer's max_tokens = 8 of a rank, got 9"
            for shape in ((9,), (3, 3)):
                x = whole(1, shape[0] * all_of_them, *shape[1:], HIDDEN)
                with pytest.raises(ValueError, match=text):
                    mlp(x)
            rows = whole(1, *(9 * me.num_ranks, INNER // me.num_ranks))
            with pytest.raises(ValueError, match=text):
                mlp.linear_out(rows)
            if me.num_ranks > 1 and not options:
                text = "max_tokens = 8 of a rank, got 10"
                with pytest.raises(ValueError, match=text):
                    mlp.linear_out(rows, (10,) + (8,) * (me.num_ranks - 1))
        # A layer with a context of the caller's alone has that one's bound.
        layer = tp.ColumnParallelLinear(HIDDEN, INNER, context=wide.context)
        layer(whole(1, 32, HIDDEN))
        with pytest.raises((TypeError, ValueError), match="max_tokens"):
            tp.ColumnParallelLinear(HIDDEN, INNER, context=wide.context, max_tokens=-1)


@on_ranks(2)
def test_other_tokens_per_rank_are_told_by_the_name_of_the_argument(me: Rank) -> None:
    with xd.init():
        mlp = make_mlp(8)
        with pytest.raises(Mismatch, match="other tokens per rank .give tokens_per_rank"):
            mlp(whole(1, 3 + me.rank, HIDDEN))
            settle(mlp.context)


@on_ranks(2)
def test_mistakes_in_weights_are_named(me: Rank) -> None:
    with xd.init():
        bounds = context((4,), 16, torch.float32)
        layer = tp.ColumnParallelLinear(16, 16, context=bounds, fused_wgrad=True)
        with pytest.raises(ValueError, match="weight.main_grad: expected a tensor"):
            layer(whole(1, 4, 16))
        with pytest.raises(TypeError, match="weight: expected a tensor, got NoneType"):
            tp.column_parallel_linear(whole(1, 4, 16), None, None, bounds)
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            layer.load_state_dict({"weight": whole(1, 8, 8), "bias": layer.bias.detach()})
