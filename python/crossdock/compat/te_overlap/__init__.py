"""TransformerEngine's interface to products overlapped with transfers ("userbuffers").

    from crossdock.compat import te_overlap as te

    te.initialize_ub([tokens, hidden], tp_size)   # tokens of all ranks
    ub = te.get_ub("fc1_fprop")
    ub.copy_into_buffer(x, local_chunk=True)
    y, *_ = te.general_gemm(w1, ub.get_buffer(), ub=ub, ub_type=te.CommOverlapType.AG)
    te.destroy_ub()

The names, their arguments and their defaults are TransformerEngine's (2.20). They stand on
`crossdock.torch.tp`, which code that is new should use. ``docs/transformer_engine.md`` says of each
option whether it is honoured, ignored or refused.
"""

import crossdock.torch  # noqa: F401 - first, since it says it if PyTorch is missing

from ._fp8 import Float8Tensor
from ._gemm import general_gemm
from ._layers import destroy_ub, get_ub, initialize_ub
from ._options import CommOverlapAlgo, CommOverlapType, UserBufferQuantizationMode
from ._overlap import CommOverlap, CommOverlapHelper, CommOverlapP2P

__all__ = [
    "CommOverlap",
    "CommOverlapAlgo",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "CommOverlapType",
    "Float8Tensor",
    "UserBufferQuantizationMode",
    "destroy_ub",
    "general_gemm",
    "get_ub",
    "initialize_ub",
]
