"""The C API as it is.

Addresses and streams are integers, and a tensor is (address, shape, dtype) of a C-contiguous tensor
on the communicator's device, with dtype = DLPack's code << 8 | bits, and with strides in elements
as a fourth part where it has others; optional ones may be None. The caller keeps all memory alive,
on CUDA until the stream has passed the call.

Operations take a dict with the fields of their struct in the header, and `stream`. A field that is
left out is as in the struct's _INIT. `plan` is a tensor of bytes, which gives plan_bytes as well,
lists are sequences, and `product` is a dict of fields.

Calls that can wait release the GIL. A failed call raises the class of crossdock.errors for its
status; TypeError where a value has the wrong Python type.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

_Spec = tuple[int, tuple[int, ...], int] | tuple[int, tuple[int, ...], int, tuple[int, ...]]

version: str
built_with_cuda: bool

class constants:
    """Numbers and words of the headers; no other Python file has them. A module."""

    MAX_RANKS: int
    MAX_EXPERTS: int
    MAX_TOPK: int
    MAX_TOKENS: int  # of a rank
    MAX_PARTS: int  # of a plan
    ROW_ALIGNMENT: int  # bytes
    LL_MAX_TOKENS: int  # of a rank, in a LowLatencyGroup
    LL_MAX_RANKS: int
    LL_MAX_IN_FLIGHT: int
    PREPARE: int
    DISPATCH: int
    COMBINE: int
    DISPATCH_BWD: int
    COMBINE_BWD: int
    LL_DISPATCH: int
    LL_COMBINE: int
    LL_RESET: int
    SET_PLACEMENT: int
    LL_SET_PLACEMENT: int
    OPERATIONS: tuple[str, ...]  # by number
    DEVICE_TYPES: dict[str, int]  # DLPack's
    DTYPES: dict[str, int]  # by name, as specs have them
    LAYOUTS: dict[str, int]
    OVERFLOWS: dict[str, int]
    DUPLICATE_IDS: dict[str, int]
    ON_ERROR: dict[str, int]
    STAGINGS: dict[str, int]
    PEER_LOSSES: dict[str, int]
    PHASES: dict[str, int]
    RECEIVES: dict[str, int]
    EP_PEER_LOSSES: dict[str, int]
    COMM_PEER_LOSSES: dict[str, int]
    QUANTISE: dict[str, tuple[int, int, str]]  # number, columns that share a scale, its dtype
    WIRES: dict[str, int]
    ACTIVATIONS: dict[str, int]
    GEMM_OPERATIONS: dict[str, int]
    GEMM_BITS: dict[str, int]  # of the operations, in a context's `operations`
    GEMM_ALGOS: dict[str, int]
    GEMM_EPILOGUES: dict[str, int]

def default_timeout_ms() -> int: ...
def unique_id(address: str | None = None, port: int = 0, timeout_ms: int = 0) -> bytes: ...
def feature_available(name: str) -> bool: ...
def feature_reason(name: str) -> str: ...
def net_adapters() -> list[dict[str, Any]]:
    """The fields of xd_net_adapter, with a list of cuda_devices, and is_up = None: not known."""

def recv_bound(**config: Any) -> int: ...
def local_experts(rank: int, **config: Any) -> int: ...
def plan_size(**config: Any) -> int: ...
def moe_sizes(ffn: int, **config: Any) -> dict[str, int]: ...
def moe_schedule(ffn: int, tokens: int, **config: Any) -> dict[str, Any]: ...
def group_memory(**config: Any) -> dict[str, int]: ...
def ll_recv_bound(max_tokens: int, **config: Any) -> int: ...
def ll_local_experts(rank: int, **config: Any) -> int: ...
def ll_plan_size(**config: Any) -> int: ...
def ll_group_memory(**config: Any) -> dict[str, int]: ...
def plan_placement(
    num_experts: int,
    num_ranks: int,
    slots_per_rank: int,
    loads: Sequence[int],
    rank_slots: Sequence[int] | None,
    rank_hosts: Sequence[int] | None,
    current: Sequence[int] | None,
    max_moves: int,
    good_enough_permille: int,
) -> tuple[list[int], dict[str, Any]]:
    """The expert of each slot, and the fields of xd_ep_placement_info."""

def placement_moves(
    num_ranks: int, slots_per_rank: int, old: Sequence[int], new: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Expert, from_slot and to_slot of each move."""

def gemm_memory(**config: Any) -> dict[str, int]: ...
def gemm_local_size(total: int, rank: int, num_ranks: int) -> int: ...
def plan_info(plan_ptr: int, plan_bytes: int) -> dict[str, int]: ...
def ll_plan_info(plan_ptr: int, plan_bytes: int) -> dict[str, int]: ...
def as_dlpack(
    ptr: int,
    shape: Sequence[int],
    dtype: int,
    device_type: int,
    device_id: int,
    owner: object,
    released: Callable[[Any], object] | None = None,
) -> Any:
    """A DLPack capsule ("dltensor") over memory.

    It keeps `owner` alive until the consumer drops it, on any thread; then it calls `released` with
    the owner.
    """

def segment_functions() -> tuple[int, int]:
    """Addresses of two functions: a pool of torch's caching allocator takes and returns memory.

    They give what the calling thread has been offered, and nothing else.
    """

def offer_segment(ptr: int, bytes: int) -> None:
    """The next segment of up to `bytes` bytes that this thread takes begins at `ptr`; 0 = none."""

def segment_taken(ptr: int) -> bool:
    """Whether the segment has been taken and not given back."""

def order_streams(device: int, first: int, second: int) -> None:
    """Work that stream `second` gets from now on waits for all that `first` has got.

    Both are streams of that CUDA device. 0 is the stream of the current context if that is one of
    the device, else of its primary one.

    Raises:
        RuntimeError: the driver's error.
    """

def reads(kind: type) -> bool:
    """Whether objects of this class are tensors that calls take as they are."""

def first_value(word: int, call: int, bits: int, value: int) -> int:
    """The number that the first caller has left in 8 bytes of shared memory, which begin as zero.

    Compares an argument between ranks without waiting for any. Where the word serves a later call
    by now, `value`, which is below 2^bits. Calls are counted modulo 2^(64-bits), from 1: a word has
    to be asked again before half as many have passed.
    """

class Comm:
    """xd_comm. Leaves with its last reference, with close(), or at the interpreter's exit."""

    def __init__(
        self,
        *,
        bootstrap: Literal["unique_id", "environment", "all_gather", "nccl", "join"],
        rank: int = 0,
        num_ranks: int = 0,
        unique_id: bytes | bytearray | None = None,
        all_gather: Callable[[bytes], Sequence[bytes]] | None = None,
        nccl_comm: int = 0,
        device_type: int = 1,
        device_id: int = 0,
        heap_bytes: int = 0,
        timeout_ms: int = 0,
        name: str = "",
        on_peer_loss: int = 0,
        host: str | None = None,
        net_interface: str | None = None,
        silence_ms: int = 0,
        global_ranks: Sequence[int] = (),
        elastic: bool = False,
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def device_type(self) -> int: ...
    @property
    def device_id(self) -> int: ...
    @property
    def timeout_ms(self) -> int: ...
    @property
    def local_ranks(self) -> int: ...
    @property
    def num_hosts(self) -> int: ...
    @property
    def host(self) -> int: ...
    @property
    def near_ranks(self) -> int: ...
    def close(self) -> None:
        """Memory from mem_alloc dies here. InvalidArgument while another thread is in a call."""

    def abort(self) -> None: ...
    def barrier(self) -> None: ...
    def all_gather(self, data: bytes) -> list[bytes]: ...
    def invite(self) -> bytes: ...
    def error(self) -> dict[str, Any] | None:
        """The fatal error as crossdock.errors.from_details takes it, or None."""

    def lost(self) -> tuple[int, ...]: ...
    def agree(
        self,
        *,
        step: int = 0,
        ok: bool = True,
        leave: bool = False,
        leave_out: Sequence[int] = (),
        timeout_ms: int = 0,
        stream: int = 0,
    ) -> dict[str, Any]:
        """xd_comm_agree; the fields of crossdock.View."""

    def view(self) -> dict[str, Any]: ...
    def mem_alloc(self, bytes: int) -> int: ...
    def mem_free(self, ptr: int) -> None: ...
    def mem_grow(self, bytes: int) -> None: ...
    def mem_info(self) -> dict[str, Any]: ...
    def mem_register(self, ptr: int, bytes: int) -> int: ...
    def mem_deregister(self, registration: int) -> None: ...
    def mem_export(self, ptr: int) -> tuple[int, int, int]: ...
    def mem_import(self, rank: int, segment: int, offset: int) -> int: ...
    def mem_copy(
        self, to: int, rank: int, segment: int, offset: int, bytes: int, stream: int = 0
    ) -> None: ...
    def routing_layout(self, fields: dict[str, Any]) -> None: ...
    def gated(self, fields: dict[str, Any]) -> None: ...
    def gated_bwd(self, fields: dict[str, Any]) -> None: ...
    def grouped_product(self, fields: dict[str, Any]) -> None: ...
    def grouped_outer(self, fields: dict[str, Any]) -> None: ...

class Group:
    """xd_ep_group, with the fields of xd_ep_config as keywords. Keeps `comm` alive."""

    FIRST_OPERATION: int  # of those that stats() counts

    def __init__(
        self,
        comm: Comm,
        /,
        *,
        num_experts: int,
        max_topk: int,
        max_tokens_per_rank: int,
        hidden: int,
        dtype: int = ...,
        max_scale_bytes: int = 0,
        layout: int = 0,
        alignment: int = 1,
        recv_capacity: int = 0,
        overflow: int = 0,
        duplicate_ids: int = 0,
        on_error: int = 0,
        staging: int = 0,
        zero_tail: int = 0,
        num_sms: int = 0,
        expert_ranks: Any = None,  # a sequence of numbers; Any, so that dicts of numbers unpack
        net_buffer_bytes: int = 0,
        wire_formats: int = 0,
        num_logical_experts: int = 0,
        on_peer_loss: int = 0,
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def comm(self) -> Comm: ...
    def close(self) -> None: ...
    def status(self) -> dict[str, Any]:
        """xd_ep_status by its fields; reads and clears."""

    def errors(self) -> int:
        """The word of xd_ep_group_watch: the number of operations that ended with an error."""

    def stats(self) -> dict[str, Any]:
        """xd_stats by its fields, and wait_ns."""

    def set_name(self, name: str) -> None: ...
    def prepare(self, fields: dict[str, Any]) -> None: ...
    def dispatch(self, fields: dict[str, Any]) -> None: ...
    def combine(self, fields: dict[str, Any]) -> None: ...
    def dispatch_bwd(self, fields: dict[str, Any]) -> None: ...
    def combine_bwd(self, fields: dict[str, Any]) -> None: ...
    def join_failed(self, operation: int, text: str, stream: int = 0) -> None: ...
    def set_placement(self, expert_of_slot: Any, choices: Any = None, stream: int = 0) -> None:
        """xd_ep_placement: choices are (choice_first, choice_slots)."""

    def moe_forward(self, fields: dict[str, Any]) -> None: ...
    def moe_backward(self, fields: dict[str, Any]) -> None: ...
    def row_experts(self, fields: dict[str, Any]) -> None: ...
    def loads(self, loads: _Spec, clear: bool, stream: int = 0) -> None: ...
    def enter_view(self, stream: int = 0) -> None: ...

class LowLatencyGroup:
    """xd_ll_group, with the fields of xd_ll_config as keywords. Keeps `comm` alive."""

    FIRST_OPERATION: int  # of those that stats() counts

    def __init__(
        self,
        comm: Comm,
        /,
        *,
        num_experts: int,
        max_topk: int,
        max_tokens_per_rank: int,
        hidden: int,
        dtype: int = ...,
        duplicate_ids: int = 0,
        on_error: int = 0,
        num_sms: int = 0,
        expert_ranks: Any = None,  # as of Group
        in_flight: int = 0,
        on_peer_loss: int = 0,
        wait_timeout_ms: int = 0,
        wire_formats: int = 0,
        num_logical_experts: int = 0,
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def comm(self) -> Comm: ...
    def close(self) -> None: ...
    def status(self) -> dict[str, Any]:
        """xd_ll_status by its fields; reads and clears."""

    def errors(self) -> int:
        """The word of xd_ll_group_watch: the number of operations that ended with an error."""

    def stats(self) -> dict[str, Any]:
        """xd_stats by its fields, and wait_ns."""

    def set_name(self, name: str) -> None: ...
    def join_failed(self, operation: int, text: str, stream: int = 0) -> None: ...
    def set_placement(self, expert_of_slot: Any, choices: Any = None, stream: int = 0) -> None:
        """xd_ep_placement: choices are (choice_first, choice_slots)."""

    def dispatch(self, fields: dict[str, Any]) -> None: ...
    def combine(self, fields: dict[str, Any]) -> None: ...
    def fault_word(self) -> int:
        """Address of the word of xd_ll_group_fault_word."""

    def mask_set(self, rank: int, masked: int, stream: int = 0) -> None: ...
    def mask_get(self, mask: _Spec, stream: int = 0) -> None: ...
    def reset(self, stream: int = 0) -> None: ...

class GemmContext:
    """xd_gemm_context, with the fields of xd_gemm_config as keywords. Keeps `comm` alive."""

    FIRST_OPERATION: int  # of those that stats() counts

    def __init__(
        self,
        comm: Comm,
        /,
        *,
        max_tokens: int,
        max_k: int = 0,
        max_n: int = 0,
        dtype: int = ...,
        operations: int = 0,
        algo: int = 0,
        num_comm_sms: int = 0,
        keep_gathered: int = 0,
        allow_fallback: int = 0,
        nccl_comm: int = 0,
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def comm(self) -> Comm: ...
    def close(self) -> None: ...
    def status(self) -> dict[str, Any]:
        """xd_gemm_status by its fields; reads and clears."""

    def errors(self) -> int:
        """The word of xd_gemm_context_watch: the number of operations that ended with an error."""

    def stats(self) -> dict[str, Any]:
        """xd_stats by its fields, and wait_ns."""

    def set_name(self, name: str) -> None: ...
    def gathered(self) -> dict[str, int]:
        """xd_gemm_view: data, rows, columns, pitch_bytes, dtype."""

    def all_gather(self, fields: dict[str, Any]) -> None: ...
    def reduce_scatter(self, fields: dict[str, Any]) -> None: ...
    def all_reduce(self, fields: dict[str, Any]) -> None: ...
    def bulk(self, fields: dict[str, Any]) -> None: ...
    def start_all_gather(self, fields: dict[str, Any]) -> None: ...
    def wait(self, stream: int = 0) -> None: ...
    def join_failed(self, operation: int, text: str, stream: int = 0) -> None: ...
    def explain(self, operation: int, fields: dict[str, Any]) -> dict[str, Any]:
        """xd_gemm_plan_info by its fields."""

class Monitor:
    """xd_monitor."""

    def __init__(self, pid: int) -> None: ...
    def read(self) -> list[dict[str, Any]]:
        """The places in use: the fields of xd_stats_source and xd_stats, place, and wait_ns."""
