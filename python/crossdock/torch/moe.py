"""A mixture-of-experts layer whose experts are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from crossdock._config import Overflow
from crossdock._core import constants
from crossdock._router import RouterOptions, capacity_of, capacity_rows

from ._autocast import autocast_dtype
from ._beside import Beside
from ._calls import SUMMABLE
from ._comm import Comm, default_comm
from ._experts import ExpertHome, make_shares, require_ordered
from ._group import EpGroup, Plan
from ._ops import combine, dispatch
from .moe_experts import GroupedExperts, SharedExperts, fill
from .moe_router import Router, Routing, balance_loss, drop_over_capacity, expert_load

_KNOWN = ", ".join(str(dtype) for dtype in SUMMABLE)


class MoEOutput(NamedTuple):
    """The result of `MoELayer`."""

    hidden: torch.Tensor  # shape of the input, and its dtype, or autocast's where that is on
    aux_loss: torch.Tensor  # [] float32, the losses times their weights: add it to the loss
    # [E] float32: share of all ranks' choices that went to each expert; no gradient. In inference
    # of this rank's choices, as is aux_loss.
    load: torch.Tensor
    order: torch.Tensor  # [1] float32, 0: stands for the layer's operations; see `after` of forward


class MoELayer(nn.Module):
    """Router, ``num_experts`` experts of which each token uses ``topk``, and shared experts.

    Rank d of W holds experts ``d * L .. d * L + L - 1`` (L = E / W): `experts` is a module of L
    experts, whose parameters ``[L, ...]`` have a slice for each. Where torch.distributed stands
    behind the communicator, they are DTensors ``[E, ...]``, ``Shard(0)`` over `Comm.mesh`, so that
    torch's own tools know that ranks hold different experts; `local_tensor` gives this rank's
    slices. Elsewhere, and on one rank, they are plain tensors ``[L, ...]``. Router and shared
    experts are plain tensors, equal on every rank.

    Every rank calls forward and backward equally often, in one order, also without tokens; tokens
    per rank may differ. After backward call `average_gradients`. In inference, which is
    ``torch.inference_mode()``, or ``eval()`` with ``torch.no_grad()``, torch.distributed is not
    used.

    Ranks that had the same ``torch.manual_seed`` before they made the layer hold the same model,
    bit for bit, on any number of ranks: each expert has a seed of its own. A module of the
    caller's keeps the parameters that it comes with. With `param_dtype` parameters are kept in a
    wider dtype than tokens travel and experts compute in.

    In eager mode on the CPU the receive tensor is trimmed to its true rows. Elsewhere it has the
    group's capacity, so that nothing waits for the host and CUDA graphs can capture the layer
    (bfloat16, see `grouped_mm`). On GPUs shared experts run in a stream beside dispatch and
    combine.

    Attributes:
        router: `Router`, or what the caller gave.
        experts: `GroupedExperts`, or the caller's module.
        shared: `SharedExperts`, or the caller's module; None = no shared experts.
        group: its ``EpGroup``.
        first_expert, num_local_experts: this rank's experts.
        param_dtype: the dtype that the experts' parameters were made with.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        topk: int,
        *,
        group: EpGroup | None = None,
        comm: Comm | None = None,
        max_tokens_per_rank: int | None = None,
        recv_capacity: int = 0,
        overflow: Overflow = "error",
        router: RouterOptions | Callable[[torch.Tensor], Routing] | None = None,
        experts: nn.Module | None = None,
        shared_experts: int | nn.Module = 0,
        capacity_factor: float | None = None,
        aux_loss_weight: float = 0.01,
        z_loss_weight: float = 0.0,
        dtype: torch.dtype | None = None,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the layer on the communicator's device. Collective if it makes its own group.

        Args:
            hidden: H, columns of a token.
            ffn: F, columns inside an expert.
            num_experts: E over all ranks, a multiple of the number of ranks.
            topk: K, experts per token.
            group: an ``EpGroup`` (expert-major) to use, which layers that run one after the other
                may share; or None, and the layer makes one from the four arguments that follow. To
                train in bfloat16 on GPUs, also under autocast, its alignment is a multiple of 8.
            comm: communicator of the group to make; None = the default one.
            max_tokens_per_rank: largest number of tokens per rank and call.
            recv_capacity: rows of the receive tensor; 0 = as many as can ever arrive.
            overflow: "error" or "drop", what happens when more arrive than fit.
            router: how experts are chosen; None = ``RouterOptions()``. Or a module or function
                that takes tokens ``[T, H]`` and gives a `Routing`, on every rank from equal
                parameters.
            experts: a module called with rows ``[R, H]`` of the group's dtype, grouped by expert,
                and their `Plan` (``offsets``, ``row_experts()``), that gives ``[R, H]``. Each of
                its parameters ``[L, ...]`` has a slice per expert; the layer makes shares of
                them, of which the module computes with `local_tensor`. None = SwiGLU.
            shared_experts: S; every token also passes one dense expert of ``S * ffn`` columns. Or
                a module that takes tokens ``[T, H]`` of the group's dtype and gives as many; it
                runs in another stream, so it may not communicate.
            capacity_factor: an expert takes at most that many times its even share
                ``T * K / E`` of a rank's tokens, those with the largest weights (see
                `drop_over_capacity`); bounds the rows of the receive tensor, too. None = no limit.
            aux_loss_weight: factor of the load-balancing loss; 0 = no such loss.
            z_loss_weight: factor of `z_loss`, of the built-in router.
            dtype: in which tokens travel and experts and shared experts compute: bfloat16, float16
                or float32; None = the group's, or torch's default. The router computes in float32.
            param_dtype: of the parameters of the built-in experts and shared experts, which are
                cast where they are used; their gradients have it. None = `dtype`. The router's
                parameters are float32.

        Raises:
            TypeError: `param_dtype` is no dtype that parameters can have.
            ValueError: sizes do not fit each other or the group; or a module of the caller's has
                parameters of another dtype than `param_dtype` says.
        """
        super().__init__()
        if capacity_factor is not None and not 0 < capacity_factor < float("inf"):
            raise ValueError(f"capacity_factor: expected a positive number, got {capacity_factor}")
        _check_param_dtype(param_dtype, experts=experts, shared_experts=shared_experts)
        sizes = _Sizes(hidden, num_experts, topk)
        if router is None or isinstance(router, RouterOptions):
            router = RouterOptions() if router is None else router
            router.check(num_experts, topk)
        elif z_loss_weight:
            raise ValueError(
                "z_loss_weight: expected 0 beside a router of the caller's, whose losses are its "
                f"Routing.loss; got {z_loss_weight}"
            )
        self._has_own_group = group is None
        if group is None:
            limits = (max_tokens_per_rank, recv_capacity, overflow, capacity_factor)
            group = _make_group(sizes, comm, dtype, *limits)
        _check_group(group, hidden, num_experts, topk, dtype)
        self.group = group
        self.hidden, self.ffn, self.num_experts, self.topk = hidden, ffn, num_experts, topk
        self.capacity_factor, self.aux_loss_weight = capacity_factor, aux_loss_weight
        self.num_local_experts = group.num_local_experts
        self.first_expert = ExpertHome(group).first_expert
        place: Any = {"dtype": param_dtype or group.dtype, "device": group.comm.device}
        if isinstance(router, RouterOptions):
            router = Router(*sizes, router, z_loss_weight=z_loss_weight, device=place["device"])
        self.router: Callable[[torch.Tensor], Routing] = router
        if experts is None:
            experts = GroupedExperts(self.num_local_experts, hidden, ffn, **place)
        self.experts = experts
        self.shared: nn.Module | None = None
        if isinstance(shared_experts, nn.Module):
            self.shared = shared_experts
        elif shared_experts * ffn:
            self.shared = SharedExperts(hidden, shared_experts * ffn, **place)
        self.reset_parameters()
        self._expert_names = [name for name, _ in experts.named_parameters()]
        self.param_dtype = _dtype_of(experts)
        make_shares("experts", experts, group)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new parameters of the built-in parts; torch's CPU generator decides which."""
        base = int(torch.randint(2**62, (), device="cpu"))
        if isinstance(self.experts, GroupedExperts):
            self.experts.draw(base + self.first_expert)
        # Experts do not draw from torch's generator, which moves on equally far on every rank,
        # by one draw.
        generator = torch.Generator("cpu").manual_seed(base + self.num_experts)
        if isinstance(self.router, Router):
            fill(self.router.weight.t(), generator)
        if isinstance(self.shared, SharedExperts):
            self.shared.draw(generator)

    if TYPE_CHECKING:  # the type of a call's result; for torch's stubs it is Any

        def __call__(
            self, x: torch.Tensor, *, after: Plan | torch.Tensor | None = None
        ) -> MoEOutput: ...

    def forward(self, x: torch.Tensor, *, after: Plan | torch.Tensor | None = None) -> MoEOutput:
        """Sends each token of ``x`` ``[..., H]`` through its experts.

        Under ``torch.autocast`` tokens travel, experts and shared experts compute, and the result
        is, in autocast's dtype, as of ``nn.Linear``. Where the experts' parameters have another
        dtype than when the layer was made, as FSDP's mixed precision or ``layer.bfloat16()`` give
        them, tokens travel and are multiplied in that, if it is no wider than the group's.

        Args:
            x: tokens of any floating-point dtype; at most ``max_tokens_per_rank`` of them. 0 is
                fine, and takes part.
            after: `MoEOutput.order` of a layer, or a plan, whose operations come before these
                although no data says so; see ``EpGroup.prepare``.

        Raises:
            TypeError, ValueError: a bad argument; no row has moved, and the peers get Mismatch.
                Where ``torch.compile(fullgraph=True)`` meets a bad x, its own error comes instead,
                and the peers wait until the timeout.
            CrossdockError: as ``EpGroup.prepare``, ``dispatch`` and ``combine``.
        """
        self._check_input(x)
        self._check_experts()
        wanted = autocast_dtype(x.device)
        dtype = wanted or self._dtype_of_rows()
        tokens = x.reshape(-1, self.hidden).contiguous()
        routing = self._route(tokens)
        chosen = routing.topk_idx
        if self.capacity_factor is not None:
            sizes = (tokens.shape[0], self.topk, self.num_experts)
            capacity = capacity_of(self.capacity_factor, *sizes)
            routing = drop_over_capacity(routing, self.num_experts, capacity)
        rows = tokens.to(dtype)
        shared = None if self.shared is None else Beside(self.shared, rows)
        alignment = self._alignment_of_plan(dtype)
        plan = self.group.prepare(routing.topk_idx, after=after, alignment=alignment)
        # Counted over ranks, so not before prepare has told whether all ranks are here.
        infers = self._infers()
        ranks = None if infers else self.group.comm.process_group
        load = expert_load(chosen, self.num_experts, ranks)
        received = dispatch(
            plan,
            rows,
            routing.topk_weights,
            exact=tokens.device.type == "cpu" and not torch.compiler.is_compiling(),
        )
        out = combine(plan, self.experts(received.tokens, plan), received.weights)
        if shared is not None:
            out = out + shared.result()
        if isinstance(self.router, Router) and not infers:
            self.router.note_load(load)
        aux_loss = self._aux_loss(routing, load)
        hidden = out.to(wanted or x.dtype).reshape(x.shape)
        return MoEOutput(hidden, aux_loss, load, plan.order)

    def _infers(self) -> bool:
        """Whether no training can follow, so that nobody's load has to be known to other ranks.

        A forward pass without gradients in training mode may be one that activation checkpointing
        repeats with them: its losses must be the same.
        """
        if torch.is_grad_enabled():
            return False
        return not self.training or torch.is_inference_mode_enabled()

    def _dtype_of_rows(self) -> torch.dtype:
        """In which tokens travel and are multiplied, without autocast."""
        now = _dtype_of(self.experts)
        if now in (None, self.param_dtype) or now.itemsize > self.group.dtype.itemsize:
            return self.group.dtype
        return now

    def _alignment_of_plan(self, dtype: torch.dtype) -> int | None:
        """The alignment that rows of this dtype need; None = the group is the caller's."""
        wanted, group = _alignment(dtype), self.group
        if self._has_own_group:
            return wanted
        if dtype != group.dtype and group.alignment % wanted and group.comm.device.type == "cuda":
            problem = (
                f"group: expected an alignment in multiples of {wanted}, as torch's kernel needs "
                f"for experts in {dtype}, got {group.alignment}"
            )
            group.refuse(constants.PREPARE, ValueError, problem)
        return None

    def _route(self, tokens: torch.Tensor) -> Routing:
        """The router's choice. A failure of it is one that the peers hear of."""
        if torch.compiler.is_compiling():
            return self.router(tokens)
        try:
            return self.router(tokens)
        except Exception as error:
            text = f"router: {type(error).__name__}: {error}"
            try:
                self.group.refuse(constants.PREPARE, RuntimeError, text)
            except RuntimeError:
                raise error from None

    def _aux_loss(self, routing: Routing, load: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros_like(load[0]) if routing.loss is None else routing.loss
        if self.aux_loss_weight and routing.probabilities is not None:
            loss = loss + self.aux_loss_weight * balance_loss(routing.probabilities, load)
        return loss

    def _check_input(self, x: torch.Tensor) -> None:
        """Refuses an x that is no batch of tokens, before anything is sent."""
        kind: type[Exception]
        self.group.require_tensors(constants.PREPARE, x=x)
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            kind = ValueError
            problem = f"expected shape [..., {self.hidden}], got {tuple(x.shape)}"
        elif not x.is_floating_point():
            kind, problem = TypeError, f"expected a floating-point dtype, got {x.dtype}"
        else:
            return
        self.group.refuse(constants.PREPARE, kind, f"x: {problem}")

    def _check_experts(self) -> None:
        """Refuses parameters that a wrapper has taken away, and those of a dtype that has no sums.

        No optimiser would see the first.
        """
        parameters = dict(self.experts.named_parameters())
        for name in self._expert_names:
            parameter = parameters.get(name)
            if parameter is None:
                problem = (
                    f"experts.{name}: expected a parameter of the layer, got none: what wraps the "
                    "model, such as DistributedDataParallel(device_mesh=...), has taken it away; "
                    "use crossdock.torch.data_parallel"
                )
                self.group.refuse(constants.PREPARE, RuntimeError, problem)
            if isinstance(self.experts, GroupedExperts) and parameter.dtype not in SUMMABLE:
                problem = f"experts.{name}: expected one of {_KNOWN}, got {parameter.dtype}"
                self.group.refuse(constants.PREPARE, TypeError, problem)

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of which ranks hold different slices, one slice per expert."""
        yield from self.experts.parameters()

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        last = self.first_expert + self.num_local_experts - 1
        return (
            f"hidden={self.hidden}, ffn={self.ffn}, num_experts={self.num_experts}, "
            f"topk={self.topk}, experts {self.first_expert} to {last} here"
        )


class _Sizes(NamedTuple):
    hidden: int
    num_experts: int
    topk: int


def _make_group(
    sizes: _Sizes,
    comm: Comm | None,
    dtype: torch.dtype | None,
    max_tokens_per_rank: int | None,
    recv_capacity: int,
    overflow: Overflow,
    capacity_factor: float | None,
) -> EpGroup:
    if max_tokens_per_rank is None:
        raise ValueError("max_tokens_per_rank: expected a number, as no group is given; got None")
    comm = default_comm() if comm is None else comm
    experts, topk, ranks = sizes.num_experts, sizes.topk, comm.num_ranks
    alignment = _alignment(torch.bfloat16)  # the largest: autocast may ask for it
    if capacity_factor is not None and not recv_capacity:
        recv_capacity = capacity_rows(
            capacity_factor, max_tokens_per_rank, topk, experts, ranks, alignment
        )
    return EpGroup(
        num_experts=experts,
        hidden=sizes.hidden,
        max_topk=topk,
        max_tokens_per_rank=max_tokens_per_rank,
        dtype=dtype or torch.get_default_dtype(),
        recv_capacity=recv_capacity,
        overflow=overflow,
        alignment=alignment,
        comm=comm,
    )


def _alignment(dtype: torch.dtype) -> int:
    """Of each expert's rows.

    Torch's grouped kernel wants the start of every zone at 16 bytes also when rows are what is
    summed over.
    """
    return 8 if dtype == torch.bfloat16 else 1


def _dtype_of(experts: nn.Module) -> torch.dtype | None:
    """The dtype of parameters: of the first of floating point; None where there is none."""
    dtypes = [p.dtype for p in experts.parameters() if p.is_floating_point()]
    return dtypes[0] if dtypes else None


def _check_param_dtype(param_dtype: torch.dtype | None, **parts: Any) -> None:
    if param_dtype is None:
        return
    if param_dtype not in SUMMABLE:
        raise TypeError(f"param_dtype: expected one of {_KNOWN}, got {param_dtype}")
    for name, part in parts.items():
        own = _dtype_of(part) if isinstance(part, nn.Module) else None
        if own not in (None, param_dtype):
            raise ValueError(
                f"param_dtype: expected None or {own}, which the parameters of {name} have, got "
                f"{param_dtype}"
            )


def _check_group(
    group: EpGroup, hidden: int, num_experts: int, topk: int, dtype: torch.dtype | None
) -> None:
    if group.layout != "expert_major":
        raise ValueError(f"group: expected layout 'expert_major', got {group.layout!r}")
    require_ordered(group)
    if group.num_experts != num_experts:
        expected = group.num_experts
        raise ValueError(f"num_experts: expected the group's {expected}, got {num_experts}")
    if hidden > group.hidden:
        raise ValueError(f"hidden: expected at most the group's {group.hidden}, got {hidden}")
    if not 1 <= topk <= num_experts:
        raise ValueError(f"topk: expected 1 to {num_experts}, the experts, got {topk}")
    if topk > group.max_topk:
        raise ValueError(f"topk: expected at most the group's {group.max_topk}, got {topk}")
    if dtype is not None and dtype != group.dtype:
        raise ValueError(f"dtype: expected the group's {group.dtype}, got {dtype}")
