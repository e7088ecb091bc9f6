"""A mixture-of-experts layer whose experts are spread over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from crossdock._config import Overflow
from crossdock._core import constants
from crossdock._overlap import Overlap, OverlapOption
from crossdock._router import RouterOptions, capacity_of
from crossdock._wire import Wire

from .._autocast import autocast_dtype, cast
from .._beside import Beside
from .._calls import SUMMABLE
from .._comm import Comm
from .._experts import ExpertHome, make_shares
from .._group import EpGroup, Plan
from .._low_latency import LowLatencyGroup
from .._membership import Membership
from .._ops import combine, dispatch
from ._arguments import (
    KNOWN_DTYPES,
    Sizes,
    alignment_of,
    check_factor,
    check_group,
    check_param_dtype,
    check_wire,
    dtype_of,
    make_group,
    peers_told,
)
from .decode import DecodeCall, decode as decoded, decode_group, refuse_decoding, require_decodable
from .experts import GroupedExperts, SharedExperts, fill
from .overlap import resolve
from .placed import place_experts, require_placed
from .router import (
    Router,
    Routing,
    balance_loss,
    checked_router,
    count_choices,
    drop_over_capacity,
    expert_load,
)


class MoEOutput(NamedTuple):
    """The result of `MoELayer`."""

    hidden: torch.Tensor  # shape of the input, and its dtype, or autocast's where that is on
    # [] float32, the losses times their weights: add it to the loss. 0 with decode.
    aux_loss: torch.Tensor
    # [E] float32: share of this rank's choices that went to each expert; no gradient. With
    # global_load, in training, of the choices of all ranks.
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
    per rank may differ. After backward call `average_gradients`. The layer itself does not use
    torch.distributed, except for `global_load` in training.

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
        decode_group: its ``LowLatencyGroup``, whose `check` and `stats` tell of forward passes with
            ``decode``; None without ``decode_tokens``.
        param_dtype: the dtype that the experts' parameters were made with.
        placement: with ``num_logical_experts``: a buffer, by which table the weights lie in slots.
        combine_wire: as given.
        overlap: the schedule that `overlap` stands for; None = serial.
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
        global_load: bool = False,
        decode_tokens: int = 0,
        overlap: OverlapOption = False,
        combine_wire: Wire = "same",
    ) -> None:
        """Makes the layer on the communicator's device.

        Collective if it makes a group: its own, or one of low latency.

        Args:
            hidden: H, columns of a token.
            ffn: F, columns inside an expert.
            num_experts: E over all ranks, a multiple of the number of ranks.
            topk: K, experts per token.
            group: an ``EpGroup`` (expert-major) to use, which layers that run one after the other
                may share; or None, and the layer makes one from the four arguments that follow. To
                train in bfloat16 on GPUs, also under autocast, its alignment is a multiple of 8.
                With ``num_logical_experts`` = E each rank has room for more experts than its share,
                and `rebalance` moves them; no other layer shares it then.
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
            global_load: whether forward passes of training exchange loads, by an all-reduce of
                torch.distributed each: `MoEOutput.load` and the load-balancing loss are then of the
                choices of all ranks. False: of this rank's, and nothing is exchanged. Equal on all
                ranks.
            decode_tokens: the most tokens of a rank in a forward pass with ``decode``, 1 to 1024;
                0 = there is none. Layers that share `group` share the memory for it, too. Equal on
                all ranks.
            overlap: whether rows travel beside products, in parts of the experts: False; True = in
                4 parts, or as many as the rank with the fewest experts has; an `Overlap`; or
                "auto", which takes parts only where they are predicted to pay (docs/overlap.md).
                For the built-in experts, of a gated activation that the
                library has, without bias and fp8. Equal on all ranks; it changes no bits where the
                products are the same, as on the CPU.
            combine_wire: the form in which sums of experts' results come back, as of `combine`, in
                all forward passes; of a given `group`, "same" or one of its ``wire_formats``. Not
                with `overlap`. Equal on all ranks.

        Raises:
            TypeError: `param_dtype` is no dtype that parameters can have.
            ValueError: sizes do not fit each other or the group; or a module of the caller's has
                parameters of another dtype than `param_dtype` says.
        """
        super().__init__()
        sizes = Sizes(hidden, num_experts, topk)
        with peers_told(group, comm):
            check_factor(capacity_factor)
            check_param_dtype(param_dtype, experts=experts, shared_experts=shared_experts)
            router = checked_router(router, *sizes[1:], z_loss_weight)
            check_wire(combine_wire, hidden, group, overlap)
        self._has_own_group = group is None
        if group is None:
            limits = (max_tokens_per_rank, recv_capacity, overflow, capacity_factor)
            group = make_group(sizes, comm, dtype, combine_wire, *limits)
        check_group(group, hidden, num_experts, topk, dtype)
        self.group, self.combine_wire = group, combine_wire
        self.placement: torch.Tensor
        self._host_table: tuple[object, np.ndarray] | None = None
        self.decode_group: LowLatencyGroup | None = None
        if decode_tokens:
            alignment = alignment_of(group.dtype) if self._has_own_group else group.alignment
            self.decode_group = decode_group(group, decode_tokens, alignment, combine_wire)
        self.global_load = global_load
        self.hidden, self.ffn, self.num_experts, self.topk = hidden, ffn, num_experts, topk
        self.capacity_factor, self.aux_loss_weight = capacity_factor, aux_loss_weight
        self.num_local_experts = group.num_local_experts
        self.first_expert = ExpertHome(group).first_expert
        device = group.comm.device
        if isinstance(router, RouterOptions):
            router = Router(*sizes, router, z_loss_weight=z_loss_weight, device=device)
        self.router: Callable[[torch.Tensor], Routing] = router
        self._take_experts(experts, shared_experts, param_dtype or group.dtype)
        self.overlap: Overlap | None = None
        if overlap is not False:
            inner = _require_overlapped(self.experts).ffn
            self.overlap = resolve(overlap, group, topk, inner)
        self.reset_parameters()
        self._expert_names = [name.split(".") for name, _ in self.experts.named_parameters()]
        self.param_dtype = dtype_of(self.experts)
        place_experts(self, self.experts)
        make_shares("experts", self.experts, group)

    def _take_experts(
        self, experts: nn.Module | None, shared: int | nn.Module, dtype: torch.dtype
    ) -> None:
        """The caller's modules, or built-in ones of this dtype."""
        place: Any = {"dtype": dtype, "device": self.group.comm.device}
        if experts is None:
            experts = GroupedExperts(self.num_local_experts, self.hidden, self.ffn, **place)
        self.experts = experts
        self.shared: nn.Module | None = None
        if isinstance(shared, nn.Module):
            self.shared = shared
        elif shared * self.ffn:
            self.shared = SharedExperts(self.hidden, shared * self.ffn, **place)

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
            self,
            x: torch.Tensor,
            *,
            after: Plan | torch.Tensor | None = None,
            decode: bool = False,
        ) -> MoEOutput: ...

    def forward(
        self,
        x: torch.Tensor,
        *,
        after: Plan | torch.Tensor | None = None,
        decode: bool = False,
    ) -> MoEOutput:
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
            decode: whether rows travel by the low-latency operations, on all ranks or on none:
                for at most ``decode_tokens`` tokens, in ``torch.no_grad()`` or
                ``torch.inference_mode()``. ``hidden`` has the same bits; ``aux_loss`` is 0, and no
                row is dropped for ``recv_capacity``.

        Raises:
            TypeError, ValueError: a bad argument; no row has moved, and the peers get Mismatch.
                Where ``torch.compile(fullgraph=True)`` meets a bad x, its own error comes instead,
                and the peers wait until the timeout.
            CrossdockError: as ``EpGroup.prepare``, ``dispatch`` and ``combine``, or as
                ``ll_dispatch`` and ``ll_combine``.
        """
        few = self._few() if decode else None
        at = _At(self.group, constants.PREPARE)
        if few is not None:
            at = _At(few, constants.LL_DISPATCH)
        self._check_input(x, at)
        require_placed(self, few, at)
        wanted = autocast_dtype(x.device)
        dtype = wanted or self._dtype_of_rows(self._check_experts(at))
        tokens = (x if x.dim() == 2 else x.reshape(-1, self.hidden)).contiguous()
        if few is not None:
            require_decodable(few, tokens.shape[0])
        routing = self._route(tokens, at)
        chosen = routing.topk_idx
        if self.capacity_factor is not None:
            sizes = (tokens.shape[0], self.topk, self.num_experts)
            capacity = capacity_of(self.capacity_factor, *sizes)
            routing = drop_over_capacity(routing, self.num_experts, capacity)
        rows = cast(tokens, dtype)
        shared = None if self.shared is None else Beside(self.shared, rows)
        if few is None:
            out, order = self._through_experts(rows, routing, after)
        else:
            given = (rows, routing, self.experts, after, self.combine_wire)
            out, order = decoded(DecodeCall(few, self.group, *given))
        if shared is not None:
            out = out + shared.result()
        aux_loss, load = self._losses(routing, chosen, few is not None)
        hidden = cast(out, wanted or x.dtype)
        if x.dim() != 2:
            hidden = hidden.reshape(x.shape)
        return MoEOutput(hidden, aux_loss, load, order)

    def _few(self) -> LowLatencyGroup:
        if self.decode_group is None:
            raise ValueError("decode: expected a layer made with decode_tokens, got one without")
        return self.decode_group

    def _through_experts(
        self, rows: torch.Tensor, routing: Routing, after: Plan | torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of the experts' results for rows ``[T, H]``, and the plan's order."""
        alignment = self._alignment_of_plan(rows.dtype)
        if self.overlap is not None:
            schedule = self.overlap
            plan = self.group.prepare(
                routing.topk_idx, after=after, alignment=alignment, parts=schedule.parts
            )
            out = self.experts(rows, plan, topk_weights=routing.topk_weights, overlap=schedule)
            return out, plan.order
        plan = self.group.prepare(routing.topk_idx, after=after, alignment=alignment)
        received = dispatch(
            plan,
            rows,
            routing.topk_weights,
            exact=rows.device.type == "cpu" and not torch.compiler.is_compiling(),
        )
        results = self.experts(received.tokens, plan)
        return combine(plan, results, received.weights, wire=self.combine_wire), plan.order

    def _infers(self) -> bool:
        """Whether no training can follow, so that this pass counts for no bias, and no loss.

        A forward pass without gradients in training mode may be one that activation checkpointing
        repeats with them: its losses must be the same.
        """
        if torch.is_grad_enabled():
            return False
        return not self.training or torch.is_inference_mode_enabled()

    def _dtype_of_rows(self, now: torch.dtype | None) -> torch.dtype:
        """In which tokens travel and are multiplied, without autocast.

        Args:
            now: the dtype of the experts' parameters.
        """
        if now in (None, self.param_dtype) or now.itemsize > self.group.dtype.itemsize:
            return self.group.dtype
        return now

    def _alignment_of_plan(self, dtype: torch.dtype) -> int | None:
        """The alignment that rows of this dtype need; None = the group is the caller's."""
        wanted, group = alignment_of(dtype), self.group
        if self._has_own_group:
            return wanted
        if dtype != group.dtype and group.alignment % wanted and group.comm.device.type == "cuda":
            problem = (
                f"group: expected an alignment in multiples of {wanted}, as torch's kernel needs "
                f"for experts in {dtype}, got {group.alignment}"
            )
            group.refuse(constants.PREPARE, ValueError, problem)
        return None

    def _route(self, tokens: torch.Tensor, at: _At) -> Routing:
        """The router's choice. A failure of it is one that the peers hear of."""
        router = self.router
        if _is_built_in(router) and at.group is self.decode_group:
            router = functools.partial(router, losses=False)
        if torch.compiler.is_compiling():
            return router(tokens)
        try:
            return router(tokens)
        except Exception as error:
            try:
                at.refuse(RuntimeError, f"router: {type(error).__name__}: {error}")
            except RuntimeError:
                raise error from None

    def _losses(
        self, routing: Routing, chosen: torch.Tensor, decode: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`MoEOutput.aux_loss` and `MoEOutput.load`, after all operations of the pass."""
        router = self.router
        built_in = _is_built_in(router)
        counts = count_choices(chosen, self.num_experts, real=built_in)
        trains = not decode and not self._infers()
        if isinstance(router, Router) and trains:
            router.note_load(counts)
        if trains and self.global_load and self.group.comm.process_group is not None:
            dist.all_reduce(counts, group=self.group.comm.process_group)
        load = expert_load(counts, chosen.numel() if built_in and not trains else None)
        loss = None if decode else routing.loss
        if not decode and self.aux_loss_weight and routing.probabilities is not None:
            balance = self.aux_loss_weight * balance_loss(routing.probabilities, load)
            loss = balance if loss is None else loss + balance
        return load.new_zeros(()) if loss is None else loss, load

    def _check_input(self, x: torch.Tensor, at: _At) -> None:
        """Refuses an x that is no batch of tokens, before anything is sent."""
        if not at.group.has(x):
            at.group.require_tensors(at.operation, x=x)
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            expected = f"expected shape [..., {self.hidden}], got {tuple(x.shape)}"
            at.refuse(ValueError, f"x: {expected}")
        if not x.is_floating_point():
            at.refuse(TypeError, f"x: expected a floating-point dtype, got {x.dtype}")

    def _check_experts(self, at: _At) -> torch.dtype | None:
        """The dtype of the experts' first parameter of floating point; None = there is none.

        Refuses parameters that a wrapper has taken away, which no optimiser would see, and those of
        a dtype that has no sums.
        """
        first = None
        built_in = isinstance(self.experts, GroupedExperts)
        for *modules, last in self._expert_names:
            module: Any = self.experts
            for name in modules:
                module = None if module is None else module._modules.get(name)
            parameter = None if module is None else module._parameters.get(last)
            if parameter is None:
                problem = (
                    "expected a parameter of the layer, got none: what wraps the model, such as "
                    "DistributedDataParallel(device_mesh=...), has taken it away; use "
                    "crossdock.torch.data_parallel"
                )
                at.refuse(RuntimeError, f"experts.{'.'.join((*modules, last))}: {problem}")
            if built_in and parameter.dtype not in SUMMABLE:
                problem = f"expected one of {KNOWN_DTYPES}, got {parameter.dtype}"
                at.refuse(TypeError, f"experts.{last}: {problem}")
            if first is None and parameter.is_floating_point():
                first = parameter.dtype
        return first

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of which ranks hold different slices, one slice per expert."""
        yield from self.experts.parameters()

    def extra_repr(self) -> str:
        """Sizes, ranks and ways, for ``print(model)``."""
        last = self.first_expert + self.num_local_experts - 1
        return (
            f"hidden={self.hidden}, ffn={self.ffn}, num_experts={self.num_experts}, "
            f"topk={self.topk}, num_ranks={self.group.comm.num_ranks}, experts "
            f"{self.first_expert} to {last} here, combine_wire={self.combine_wire!r}, "
            f"overlap={self.overlap or False}"
        )


def _require_overlapped(experts: nn.Module) -> GroupedExperts:
    """Refuses experts whose products are not in the one call."""
    # A class that derives from it may have a forward of its own.
    if not isinstance(experts, GroupedExperts) or type(experts) is not GroupedExperts:
        got = type(experts).__name__
        raise ValueError(f"experts: expected None or a GroupedExperts beside overlap, got a {got}")
    if obstacle := experts.overlap_obstacle():
        raise ValueError(f"experts: beside overlap, got {obstacle}")
    return experts


def _is_built_in(router: object) -> TypeGuard[Router]:
    """Whether all its choices are experts, as nothing has been put in its place or behind it."""
    return (
        isinstance(router, Router)
        and type(router).forward is Router.forward
        and not router._forward_hooks
    )


class _At(NamedTuple):
    """The operation that begins a forward pass: peers that are in it hear of a mistake."""

    group: Membership
    operation: int

    def refuse(self, kind: type[Exception], problem: str) -> NoReturn:
        if isinstance(self.group, LowLatencyGroup):
            refuse_decoding(self.group, kind, problem)
        self.group.refuse(self.operation, kind, problem)
