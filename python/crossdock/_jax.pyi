"""XLA's custom calls, and the groups and contexts that they find.

Built where jaxlib is found. Blocking calls release the GIL. Failures raise the classes of
``crossdock.errors``. Groups that `close` drops live on in executables that use them.
"""

from typing import Any

def registrations() -> dict[str, dict[str, dict[str, Any]]]:
    """Entries for jax.ffi to register, by platform: ``types`` and ``targets`` with their stages."""

def calls() -> int:
    """How often XLA has called a handler of an operation in this process.

    Less often than operations have run where it replays command buffers.
    """

class Ranks:
    """The communicators of this process's devices."""

    def __init__(
        self,
        device_type: int,
        rank_infos: list[tuple[int, int, int, int, bytes, str, list[int]]],
        timeout_ms: int = 0,
    ) -> None:
        """Joins all at once. Collective, blocking.

        Args:
            device_type: DLPack's: 1 = CPU, 2 = CUDA.
            rank_infos: for each device (ordinal by which XLA names it to custom calls, or -1 in a
                process that has one only; CUDA device; rank; number of ranks; unique id; name of
                the set of ranks; other numbers of its ranks, or none).
            timeout_ms: longest wait for a peer; 0 = the environment's, else 10 minutes.
        """

    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def error(self) -> tuple[str, str] | None:
        """(status, text) of the first communicator that is finished."""

    def register_memory(self, pointers: list[int], bytes: list[int]) -> None:
        """Makes memory of each rank part of its symmetric memory. Collective, blocking."""

    def abort(self) -> None: ...

class Group:
    """One config's groups on all ranks of this process; made by `create` or an executable."""

    def __init__(self, ranks: Ranks, text: str, /, **config: Any) -> None:
        """Local.

        Args:
            text: the config as executables name it.
            config: fields of ``xd_ep_config``, dtype as DLPack's code << 8 | bits.
        """

    @property
    def number(self) -> int:
        """By which custom calls find it; no other group of this process ever has it."""

    def create(self) -> None:
        """Makes the groups, unless they have been made. Collective, blocking."""

    def status(self, index: int) -> dict[str, Any] | None:
        """Reads and clears the non-fatal errors of the rank with that index in `rank_infos`."""

    def errors(self, index: int) -> int | None:
        """How many operations of that rank have ended with a non-fatal error."""

    def set_placement(self, table: list[int], choices: tuple[list[int], list[int]] | None) -> None:
        """Makes the groups, which it creates if need be, route by a table. Collective, blocking.

        Args:
            table: the expert in each slot of all ranks.
            choices: choice_first and choice_slots of ``xd_ep_placement``.
        """

    def fail_set_placement(self, text: str) -> None:
        """Takes the turn of peers' `set_placement`, which fails there. It raises."""

    def loads(self, index: int, ranks: int, experts: int, clear: bool) -> list[int] | None:
        """``xd_ep_group_loads`` of that rank, [ranks, experts]; None before `create`."""

    def close(self) -> None: ...

class LowLatencyGroup:
    """One config's groups of low latency on all ranks of this process; as `Group` otherwise."""

    def __init__(self, ranks: Ranks, text: str, /, **config: Any) -> None:
        """Local.

        Args:
            text: the config as executables name it.
            config: fields of ``xd_ll_config``, dtype as DLPack's code << 8 | bits.
        """

    @property
    def number(self) -> int: ...
    def create(self) -> None: ...
    def status(self, index: int) -> dict[str, Any] | None: ...
    def errors(self, index: int) -> int | None: ...
    def set_placement(
        self, table: list[int], choices: tuple[list[int], list[int]] | None
    ) -> None: ...
    def fail_set_placement(self, text: str) -> None: ...
    def close(self) -> None: ...

class Context:
    """One config's contexts of products on all ranks of this process; as `Group` otherwise."""

    def __init__(self, ranks: Ranks, text: str, /, **config: Any) -> None:
        """Local.

        Args:
            text: the config as executables name it.
            config: fields of ``xd_gemm_config``, dtype as DLPack's code << 8 | bits.
        """

    @property
    def number(self) -> int: ...
    def create(self) -> None: ...
    def status(self, index: int) -> dict[str, Any] | None: ...
    def errors(self, index: int) -> int | None: ...
    def explain(self, index: int, operation: int, fields: dict[str, Any]) -> dict[str, Any] | None:
        """xd_gemm_plan_info of that rank by its fields, for fields of xd_gemm_args.

        None before `create`.
        """

    def close(self) -> None: ...
