"""The order of operations and of their backward operations.

Every operation takes an order, four bytes a rank, and gives one. Backward operations take the
gradient of the order that their operation gave and give that of the order it took, so that they
form the same chain in the other direction. They also take what is kept here, so that no backward
operation runs before its own operation has, whatever the data say.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

__all__ = ["kept"]


def kept(done: jax.Array, before: jax.Array) -> jax.Array:
    """The part of an operation's results that its backward operation needs.

    Args:
        done: the order that the operation gave, by a name for policies of ``jax.checkpoint``. One
            that saves it need not run an operation again only to come after it.
        before: the order that it took. It has no name, so that where earlier operations are run
            again, the backward one comes behind them, which its own data need not say.
    """
    return checkpoint_name(done, "crossdock_order") + before
