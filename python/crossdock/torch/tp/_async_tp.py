"""Collectives of compiled programs become products that hide them.

A pass of inductor's, which runs once on each forward and each backward graph, after autograd. It
knows what ``torch.distributed._functional_collectives`` and DTensors leave there:

    all_gather_into_tensor, wait_tensor, perhaps split and cat for a dimension, mm of the result
    mm, perhaps split and cat for a dimension, reduce_scatter_tensor, wait_tensor

with a product of two dimensions, or one between two reshapes; also addmm behind an all-gather.
"""

from __future__ import annotations

import hashlib
import operator
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Graph, Node

from . import _torch_names  # noqa: F401  (registers the operators)
from ._groups import comm_of_group, name_of_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["disable_async_tp", "enable_async_tp"]

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_SPLITS = (_aten.split.Tensor, _aten.split.sizes, _aten.split_with_sizes.default)
_RESHAPES = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)
_OPERANDS = (torch.bfloat16, torch.float16, torch.float32)

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
                # What is compiled depends on this file and on the operators' shapes.
                files = sorted(pathlib.Path(__file__).parent.glob("*.py"))
                sources = b"".join(file.read_bytes() for file in files)
                mine = hashlib.sha256(sources + repr(sorted(_groups)).encode()).hexdigest()
                if self.before is None:
                    return mine
                before: Any = self.before
                other = before.uuid() if hasattr(before, "uuid") else None
                # What a pass without a name makes must not be found again.
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
        if not isinstance(source, Node) or len(source.users) != 1:
            continue
        if source.target is _c10d.all_gather_into_tensor.default:
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


def _value(node: Node) -> torch.Tensor:
    return node.meta["val"]


def _argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


# ---- Products ------------------------------------------------------------------------------------


class _Product(NamedTuple):
    """A product ``a @ b``, and perhaps a bias, whose result is `result`."""

    mm: Node
    result: Node  # the product, or its reshape to the dimensions of a
    a: Node  # of any number of dimensions
    b: Node
    bias: Any


def _factors(mm: Node) -> tuple[Any, Any, Any] | None:
    """a, b and bias of a product without other factors."""
    if mm.target is _aten.mm.default:
        return mm.args[0], mm.args[1], None
    if mm.target is _aten.addmm.default:
        factors = (mm.kwargs.get("alpha", 1), mm.kwargs.get("beta", 1))
        return (mm.args[1], mm.args[2], mm.args[0]) if factors == (1, 1) else None
    return None


def _products_of(a: Node) -> list[_Product]:
    """The products with this left operand."""
    found = []
    for user in a.users:
        factors = _factors(user)
        if factors is not None and factors[0] is a and factors[1] is not a:
            found.append(_Product(user, user, a, factors[1], factors[2]))
        elif user.target in _RESHAPES and user.args[0] is a:
            found += _reshaped_products(a, user)
    return found


def _reshaped_products(a: Node, flat: Node) -> list[_Product]:
    """Those of a whose leading dimensions are made one, and of the result several again."""
    found = []
    for mm in flat.users:
        factors = _factors(mm)
        if factors is None or factors[0] is not flat:
            continue
        shape = [*_value(a).shape[:-1], _value(factors[1]).shape[-1]]
        results = [
            user
            for user in mm.users
            if user.target in _RESHAPES and list(_value(user).shape) == shape
        ]
        if results and len(results) == len(mm.users):
            found.append(_Product(mm, results[0], a, factors[1], factors[2]))
    return found


def _suits(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _OPERANDS and tensor.dim() >= 2


def _whole_rows(columns: Any, dtype: torch.dtype) -> bool:
    """Whether rows of so many columns are of whole 16 bytes, as the library takes them."""
    return isinstance(columns, int) and columns * dtype.itemsize % 16 == 0


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


def _gathered_along(wait: Node, ranks: int) -> tuple[Node, int]:
    """The node with the gathered tensor, and the dimension along which ranks follow one another."""
    cats: set[Node] = set()
    for user in wait.users:
        parts = user.users if user.target in _SPLITS else [user]
        for part in parts:
            if part.target is operator.getitem or part.target is _aten.slice.Tensor:
                cats.update(part.users)
    if len(cats) == 1:
        (cat,) = cats
        pieces = cat.args[0] if cat.target is _aten.cat.default else None
        if isinstance(pieces, (list, tuple)) and len(pieces) == ranks:
            if _are_shares(pieces, wait, 0, ranks):
                return cat, _argument(cat, 1, "dim", 0) % _value(cat).dim()
    return wait, 0


def _are_shares(pieces: Sequence[Any], source: Node, dim: int, ranks: int) -> bool:
    """Whether the pieces are all shares of the source along a dimension, in order."""
    size = _value(source).shape[dim]
    share = size // ranks
    for number, piece in enumerate(pieces):
        if not isinstance(piece, Node):
            return False
        if piece.target is operator.getitem:
            split: Any = piece.args[0]
            if not isinstance(split, Node) or split.target not in _SPLITS:
                return False
            along = _argument(split, 2, "dim", 0)
            sizes = split.args[1]
            even = (
                sizes == share
                or list(sizes if isinstance(sizes, (list, tuple)) else ()) == [share] * ranks
            )
            if split.args[0] is not source or along != dim or not even or piece.args[1] != number:
                return False
        elif piece.target is _aten.slice.Tensor:
            place = (_argument(piece, 1, "dim", 0), _argument(piece, 2, "start"))
            end = _argument(piece, 3, "end")
            last = number == ranks - 1 and isinstance(end, int) and end >= size
            if piece.args[0] is not source or place != (dim, number * share):
                return False
            if end != (number + 1) * share and not last:
                return False
        else:
            return False
    return True


def _rewrite_all_gather(graph: Graph, gather: Node, wait: Node) -> bool:
    shard, ranks, name = gather.args[:3]
    if name not in _groups or not isinstance(shard, Node) or not isinstance(ranks, int):
        return False
    if not _suits(_value(shard)) or not _whole_rows(_value(shard).shape[-1], _value(shard).dtype):
        return False
    gathered, dim = _gathered_along(wait, ranks)
    if dim == _value(shard).dim() - 1:
        return False  # nothing to hide it behind
    products = [
        one
        for one in _products_of(gathered)
        if _whole_rows(_value(one.b).shape[-1], _value(one.b).dtype)
        and not _depends_on(one.b, gathered)
    ]
    if not products:
        return False
    multiplied = {one.mm for one in products}
    others = {
        user
        for user in gathered.users
        if user not in multiplied
        and not (user.target in _RESHAPES and multiplied.issuperset(user.users))
    }
    with graph.inserting_before(gather):
        fused = _call(
            graph,
            torch.ops.crossdock.fused_all_gather_matmul.default,
            (shard, [one.b for one in products], dim, name),
            {"return_A": bool(others)},
        )
        outputs = _call(graph, operator.getitem, (fused, 1))
        for number, one in enumerate(products):
            out = _call(graph, operator.getitem, (outputs, number))
            if one.bias is not None:
                out = _call(graph, _aten.add.Tensor, (out, one.bias))
            one.result.replace_all_uses_with(out)
        if others:
            gathered.replace_all_uses_with(_call(graph, operator.getitem, (fused, 0)))
    return True


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
    source, reduce_op, ranks, name = scatter.args[:4]
    if name not in _groups or reduce_op not in ("sum", "avg") or not isinstance(source, Node):
        return False
    if not isinstance(ranks, int):
        return False
    dim, result = 0, source
    if source.target is _aten.cat.default and _argument(source, 1, "dim", 0) == 0:
        pieces = source.args[0]
        whole = _cut_from(pieces[0]) if isinstance(pieces, (list, tuple)) and pieces else None
        if whole is None or not isinstance(pieces, (list, tuple)) or len(pieces) != ranks:
            return False
        result = whole
        dims = range(1, _value(result).dim())
        along = [one for one in dims if _are_shares(pieces, result, one, ranks)]
        if len(along) != 1:
            return False
        dim = along[0]
    product = _product_that_made(result)
    if product is None or dim == _value(result).dim() - 1:
        return False
    a, b = _value(product.a), _value(product.b)
    if not _suits(a) or not _whole_rows(b.shape[-1], b.dtype) or not _only_for(result, scatter):
        return False
    if not _whole_rows(a.shape[-1], a.dtype):
        return False
    with graph.inserting_before(wait):
        fused = _call(
            graph,
            torch.ops.crossdock.fused_matmul_reduce_scatter.default,
            (product.a, product.b, reduce_op, dim, name),
        )
    wait.replace_all_uses_with(fused)
    return True


def _product_that_made(result: Node) -> _Product | None:
    """The product, without a bias, of which this is the result."""
    mm, a_shape = result, None
    if result.target in _RESHAPES and isinstance(result.args[0], Node):
        mm = result.args[0]
        a_shape = list(_value(result).shape[:-1])
    if mm.target is not _aten.mm.default:
        return None
    a, b = mm.args
    if not isinstance(a, Node) or not isinstance(b, Node):
        return None
    if a_shape is None:
        return _Product(mm, result, a, b, None)
    if a.target not in _RESHAPES or not isinstance(a.args[0], Node):
        return None
    source = a.args[0]
    if [*a_shape, _value(a).shape[-1]] != list(_value(source).shape):
        return None
    return _Product(mm, result, source, b, None)


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
    mm = result.args[0] if result.target in _RESHAPES else result
    return isinstance(mm, Node) and len(mm.users) == 1 or mm is result
