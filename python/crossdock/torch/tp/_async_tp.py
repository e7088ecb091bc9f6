"""Collectives of compiled programs become products that hide them.

A pass of inductor's, which runs once on each forward and each backward graph, after autograd. It
knows what ``torch.distributed._functional_collectives`` and DTensors leave there:

    all_gather_into_tensor, wait_tensor, perhaps split and cat for a dimension, mm of the result
    mm, perhaps split and cat for a dimension, reduce_scatter_tensor, wait_tensor

with a product of two dimensions, or one between two reshapes; also addmm behind an all-gather, and
_scaled_mm, whose rows of fp8 may be gathered as bytes (view to uint8, all_gather, view back).
"""

from __future__ import annotations

import hashlib
import operator
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from . import _torch_names  # noqa: F401  (registers the operators)
from ._async_products import RESHAPES, Product, argument, product_that_made, products_of, value
from ._groups import comm_of_group, name_of_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["disable_async_tp", "enable_async_tp"]

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_SPLITS = (_aten.split.Tensor, _aten.split.sizes, _aten.split_with_sizes.default)

# Names of process groups whose collectives are rewritten.
_groups: set[str] = set()


def enable_async_tp(group: ProcessGroup | DeviceMesh | None = None) -> None:
    """From now on compiled programs hide the collectives of this group behind products.

    ``torch.compile`` with inductor then rewrites all-gather followed by matrix products, and a
    matrix product followed by reduce-scatter, as DTensors and functional collectives make them, to
    `fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, forward and backward. Results are
    those of the program, but for the order of sums. Collective: makes the group's communicator. On
    a GPU run a compiled step once before capturing it in a CUDA graph.

    Args:
        group: a process group, or a mesh of one dimension; None = the default group.

    Raises:
        ValueError: the mesh has more dimensions, or torch.distributed is not initialised.
        CrossdockError: as `init`.
    """
    from torch._inductor import config

    name = name_of_group(group)
    comm_of_group(name)
    _groups.add(name)
    options: Any = config
    if not isinstance(options.post_grad_custom_post_pass, _async_tp_pass()):
        options.post_grad_custom_post_pass = _async_tp_pass()(options.post_grad_custom_post_pass)


def disable_async_tp(group: ProcessGroup | DeviceMesh | None = None) -> None:
    """Programs that are compiled from now on keep the collectives of this group."""
    from torch._inductor import config

    _groups.discard(name_of_group(group))
    options: Any = config
    if not _groups and isinstance(options.post_grad_custom_post_pass, _async_tp_pass()):
        options.post_grad_custom_post_pass = options.post_grad_custom_post_pass.before


def _async_tp_pass() -> Any:
    """The class of the pass; inductor is imported with its first use."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    global _made_class
    if _made_class is None:

        class AsyncTp(CustomGraphPass):
            """Rewrites graphs, after another pass that the user has set."""

            def __init__(self, before: Callable[[Graph], None] | None) -> None:
                self.before = before

            def __call__(self, graph: Graph) -> None:
                if self.before is not None:
                    self.before(graph)
                rewrite(graph)

            def uuid(self) -> Any:
                # Compiled code depends on this file and on the operators' shapes.
                files = sorted(pathlib.Path(__file__).parent.glob("*.py"))
                sources = b"".join(file.read_bytes() for file in files)
                mine = hashlib.sha256(sources + repr(sorted(_groups)).encode()).hexdigest()
                if self.before is None:
                    return mine
                before: Any = self.before
                other = before.uuid() if hasattr(before, "uuid") else None
                # Code that a pass without a name makes must not be found again.
                return None if other is None else (mine, other)

        _made_class = AsyncTp
    return _made_class


_made_class: Any = None


def rewrite(graph: Graph) -> None:
    """Rewrites what can be rewritten in the graph."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    rewritten = []
    for node in list(graph.nodes):
        if node.target is not _c10d.wait_tensor.default:
            continue
        source = node.args[0]
        if not isinstance(source, Node) or not _only_waited_for(source, node):
            continue
        if source.target is _c10d.all_gather_into_tensor.default and len(source.users) == 1:
            done = _rewrite_all_gather(graph, source, node)
        elif source.target is _c10d.reduce_scatter_tensor.default:
            done = _rewrite_reduce_scatter(graph, source, node)
        else:
            done = False
        if done:
            rewritten.append((node, source))
    if not rewritten:
        return
    # A matrix may be made behind the place of the gather that it is multiplied with now.
    stable_topological_sort(graph)
    graph.eliminate_dead_code()
    for wait, source in rewritten:  # collectives are never dead for themselves
        if not wait.users:
            graph.erase_node(wait)
            graph.erase_node(source)
    graph.eliminate_dead_code()


def _all_of(collective: Node) -> tuple[Any, ...]:
    """Its arguments, of any types."""
    return collective.args


def _only_waited_for(collective: Node, wait: Node) -> bool:
    """Whether nothing else reads it; a graph's output may, for a backward pass that waits again."""
    return all(user is wait or user.op == "output" for user in collective.users)


# ---- All-gather, then products -------------------------------------------------------------------


def _cut_from(piece: Any) -> Node | None:
    """The tensor of which this is a part, by split or by slice."""
    source: Any = piece.args[0] if isinstance(piece, Node) and piece.args else None
    if isinstance(piece, Node) and piece.target is operator.getitem:
        if not isinstance(source, Node) or source.target not in _SPLITS:
            return None
        source = source.args[0]
    elif not isinstance(piece, Node) or piece.target is not _aten.slice.Tensor:
        return None
    return source if isinstance(source, Node) else None


def _as_bytes(node: Node) -> Node:
    """The node as its only user sees it, which may take its bytes for those of another type."""
    (user, *others) = node.users or (node,)
    return user if user.target is _aten.view.dtype and not others else node


def _gathered_along(wait: Node, ranks: int) -> tuple[Node, int]:
    """The node with the gathered tensor, and the dimension along which ranks follow one another."""
    cats: set[Node] = set()
    for user in wait.users:
        parts = user.users if user.target in _SPLITS else [user]
        for part in parts:
            if part.target is operator.getitem or part.target is _aten.slice.Tensor:
                cats.update(_as_bytes(part).users)
    if len(cats) == 1:
        (cat,) = cats
        pieces = cat.args[0] if cat.target is _aten.cat.default else None
        if isinstance(pieces, (list, tuple)) and len(pieces) == ranks:
            if _are_shares(pieces, wait, 0, ranks):
                return cat, argument(cat, 1, "dim", 0) % value(cat).dim()
    return wait, 0


def _are_shares(pieces: Sequence[Any], source: Node, dim: int, ranks: int) -> bool:
    """Whether the pieces are all shares of the source along a dimension, in order."""
    size = value(source).shape[dim]
    share = size // ranks
    for number, piece in enumerate(pieces):
        if isinstance(piece, Node) and piece.target is _aten.view.dtype:
            piece = piece.args[0]
        if not isinstance(piece, Node):
            return False
        if piece.target is operator.getitem:
            split: Any = piece.args[0]
            if not isinstance(split, Node) or split.target not in _SPLITS:
                return False
            along = argument(split, 2, "dim", 0)
            sizes = split.args[1]
            even = (
                sizes == share
                or list(sizes if isinstance(sizes, (list, tuple)) else ()) == [share] * ranks
            )
            if split.args[0] is not source or along != dim or not even or piece.args[1] != number:
                return False
        elif piece.target is _aten.slice.Tensor:
            place = (argument(piece, 1, "dim", 0), argument(piece, 2, "start"))
            end = argument(piece, 3, "end")
            last = number == ranks - 1 and isinstance(end, int) and end >= size
            if piece.args[0] is not source or place != (dim, number * share):
                return False
            if end != (number + 1) * share and not last:
                return False
        else:
            return False
    return True


def _rewrite_all_gather(graph: Graph, gather: Node, wait: Node) -> bool:
    shard, ranks, name = _all_of(gather)[:3]
    if name not in _groups or not isinstance(shard, Node) or not isinstance(ranks, int):
        return False
    found, dim = _gathered_along(wait, ranks)
    gathered = found
    if value(found).dtype == torch.uint8:  # perhaps the bytes of others
        views = [user for user in found.users if user.target is _aten.view.dtype]
        gathered = views[0] if len(views) == 1 else found
    if value(gathered).dim() < 2 or dim == value(gathered).dim() - 1:
        return False  # nothing to hide it behind
    products = _one_kind(products_of(gathered), gathered)
    if not products:
        return False
    multiplied = {one.mm for one in products}
    others = {
        user
        for user in gathered.users
        if user not in multiplied
        and not (user.target in RESHAPES and multiplied.issuperset(user.users))
    }
    if gathered is not found:
        others |= set(found.users) - {gathered}
    with graph.inserting_before(gather):
        shard = _typed(graph, shard, value(gathered).dtype)
        fused = _gathering(graph, shard, products, dim, name, bool(others))
        outputs = _call(graph, operator.getitem, (fused, 1))
        for number, one in enumerate(products):
            out = _call(graph, operator.getitem, (outputs, number))
            if one.bias is not None and one.scale_a is None:
                out = _call(graph, _aten.add.Tensor, (out, one.bias))
            one.result.replace_all_uses_with(out)
        if others:
            rows = _call(graph, operator.getitem, (fused, 0))
            gathered.replace_all_uses_with(rows)
            if gathered is not found:  # its bytes may be read as well
                rows = _call(graph, _aten.view.dtype, (rows, value(found).dtype))
                found.replace_all_uses_with(rows, lambda user: user is not gathered)
    return True


def _one_kind(products: list[Product], gathered: Node) -> list[Product]:
    """The products that one operation makes: plain, or of fp8 by the same scale of its rows."""
    kept: list[Product] = []
    for one in products:
        made_of = [one.b]
        if one.scale_a is not None:
            given = (one.scale_a, one.scale_b, one.bias, one.scale_result)
            made_of += [node for node in given if node is not None]
        if any(_depends_on(node, gathered) for node in made_of):
            continue
        if not kept or one.scale_a is kept[0].scale_a:
            kept.append(one)
    return kept


def _typed(graph: Graph, shard: Node, dtype: torch.dtype) -> Node:
    """This rank's part as what it stands for, if its bytes are gathered."""
    if value(shard).dtype == dtype:
        return shard
    source = shard.args[0] if shard.target is _aten.view.dtype else None
    if isinstance(source, Node) and value(source).dtype == dtype:
        return source
    return _call(graph, _aten.view.dtype, (shard, dtype))


def _gathering(
    graph: Graph, shard: Node, products: list[Product], dim: int, name: str, return_a: bool
) -> Node:
    """The operation in the place of a gather and its products."""
    matrices = [one.b for one in products]
    scale = products[0].scale_a
    if scale is None:
        target = torch.ops.crossdock.fused_all_gather_matmul.default
        return _call(graph, target, (shard, matrices, dim, name), {"return_A": return_a})
    if value(scale).numel() > 1:  # of all ranks' rows: laid out as these are
        leading = list(value(products[0].result).shape[:-1])
        scale = _call(graph, _aten.reshape.default, (scale, [*leading, 1]))
    beside = (
        [one.bias for one in products],
        [one.scale_result for one in products],
        [one.out_dtype for one in products],
        [one.fast for one in products],
    )
    return _call(
        graph,
        torch.ops.crossdock.fused_all_gather_scaled_matmul.default,
        (shard, matrices, scale, [one.scale_b for one in products], dim, name, *beside),
    )


def _depends_on(node: Node, other: Node) -> bool:
    """Whether `other` is among what the node is made of."""
    seen, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source is other:
                return True
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return False


def _call(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> Node:
    """A node with the shapes that inductor needs."""
    node = graph.call_function(target, args, kwargs or {})
    values = torch.fx.map_arg((args, kwargs or {}), lambda one: one.meta["val"])
    sample = next(v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.Tensor))
    mode = getattr(sample, "fake_mode", None)
    if mode is None:
        node.meta["val"] = target(*values[0], **values[1])
    else:
        with mode:
            node.meta["val"] = target(*values[0], **values[1])
    return node


# ---- Product, then reduce-scatter ----------------------------------------------------------------


def _rewrite_reduce_scatter(graph: Graph, scatter: Node, wait: Node) -> bool:
    source, reduce_op, ranks, name = _all_of(scatter)[:4]
    if name not in _groups or reduce_op not in ("sum", "avg") or not isinstance(source, Node):
        return False
    if not isinstance(ranks, int):
        return False
    dim, result = 0, source
    if source.target is _aten.cat.default and argument(source, 1, "dim", 0) == 0:
        pieces = source.args[0]
        whole = _cut_from(pieces[0]) if isinstance(pieces, (list, tuple)) and pieces else None
        if whole is None or not isinstance(pieces, (list, tuple)) or len(pieces) != ranks:
            return False
        result = whole
        dims = range(1, value(result).dim())
        along = [one for one in dims if _are_shares(pieces, result, one, ranks)]
        if len(along) != 1:
            return False
        dim = along[0]
    product = product_that_made(result)
    if product is None or dim == value(result).dim() - 1:
        return False
    if value(product.a).dim() < 2 or not _only_for(result, scatter):
        return False
    if product.scale_a is not None and (
        product.scale_result is not None or value(product.mm).dtype.itemsize == 1
    ):
        return False  # the program sums what has been rounded to fp8
    with graph.inserting_before(wait):
        fused = _scattering(graph, product, reduce_op, dim, name)
    wait.replace_all_uses_with(fused)
    for user in list(scatter.users):
        if user.op == "output":  # kept for the backward pass
            user.replace_input_with(scatter, fused)
    return True


def _scattering(graph: Graph, product: Product, reduce_op: str, dim: int, name: str) -> Node:
    """The operation in the place of a product and its reduce-scatter."""
    operands = (product.a, product.b)
    if product.scale_a is None:
        target = torch.ops.crossdock.fused_matmul_reduce_scatter.default
        return _call(graph, target, (*operands, reduce_op, dim, name))
    shape = list(value(product.result).shape)
    scales = (product.scale_a, product.scale_b)
    beside = (None, None, product.out_dtype, product.fast)
    return _call(
        graph,
        torch.ops.crossdock.fused_scaled_matmul_reduce_scatter.default,
        (*operands, *scales, reduce_op, dim, dim, name, shape, *beside),
    )


def _only_for(result: Node, scatter: Node) -> bool:
    """Whether nothing else reads the product."""
    seen, todo = set(), [result]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user is scatter or user in seen:
                continue
            cuts = user.target in (
                *_SPLITS,
                operator.getitem,
                _aten.slice.Tensor,
                _aten.cat.default,
            )
            if not cuts:
                return False
            seen.add(user)
            todo.append(user)
    mm = result.args[0] if result.target in RESHAPES else result
    return isinstance(mm, Node) and len(mm.users) == 1 or mm is result
