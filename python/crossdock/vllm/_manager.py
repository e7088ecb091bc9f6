"""vLLM's manager of the traffic of its expert-parallel ranks, on Crossdock."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from crossdock._core import constants
from crossdock.compat._traffic import Traffic

__all__ = ["CrossdockAll2AllManager", "Handle"]

_LOW_LATENCY = "deepep_low_latency"
_NOT_READ = "VLLM_DEEPEP_BUFFER_SIZE_MB"


class Handle(NamedTuple):
    """The part of the manager that classes of layers need.

    Attributes:
        manager: theirs.
        most: tokens of a rank in one batch, at most.
    """

    manager: CrossdockAll2AllManager
    most: int


class CrossdockAll2AllManager(All2AllManagerBase):
    """Has a communicator for the ranks of `cpu_group`, and groups for the sizes of layers.

    The first batch makes them, in which all ranks take part: then the sizes are known, and the
    device.

    Args:
        cpu_group: of torch.distributed.
        tcp_store_group: by which vLLM finds out which ranks are on one machine.
        device_group: not used.

    Attributes:
        traffic: communicator and groups.
        num_sms: multiprocessors that groups use which are made from now on; 0 = Crossdock chooses.
        support_fault_tolerance: whether layers go on without a rank that is lost.
    """

    def __init__(
        self, cpu_group: Any, tcp_store_group: Any = None, device_group: Any = None
    ) -> None:
        super().__init__(cpu_group, tcp_store_group)
        config = get_current_vllm_config()
        parallel = config.parallel_config
        self._few = parallel.all2all_backend == _LOW_LATENCY
        self.support_fault_tolerance = self._few and bool(parallel.enable_fault_tolerance)
        self._most: int = config.scheduler_config.max_num_batched_tokens
        self.traffic = Traffic(cpu_group, masks=self.support_fault_tolerance)
        self.num_sms = 0
        self._last_mask: torch.Tensor | None = None
        if os.environ.get(_NOT_READ):
            logging.getLogger("vllm.crossdock").info(
                "%s has no effect: Crossdock takes the memory that the sizes need", _NOT_READ
            )

    def get_handle(self, kwargs: dict[str, Any]) -> Handle:
        """The part of this that a layer's class is made with.

        Args:
            kwargs: vLLM's sizes, of which the largest number of tokens is read.

        Raises:
            ValueError: more tokens than low latency takes.
        """
        most = kwargs.get("max_num_tokens_per_dp_rank", kwargs.get("num_max_tokens_per_rank"))
        most = self._most if most is None else most
        if self._few and most > constants.LL_MAX_TOKENS:
            raise ValueError(
                f"--max-num-batched-tokens: expected at most {constants.LL_MAX_TOKENS} with "
                f"--all2all-backend {_LOW_LATENCY}, got {most}"
            )
        return Handle(self, most)

    def max_sms_used(self) -> int | None:
        """0 for low latency, as nothing runs between halves; None = all that there are."""
        return 0 if self._few else None

    def set_num_sms(self, num_sms: int) -> None:
        """Sets the multiprocessors of groups that are made from now on.

        Batches use the groups of the number that is set when they come: vLLM sets one for steps
        with two micro-batches and all of the device's for others, for which Crossdock chooses.

        Args:
            num_sms: at least 2, rounded down to an even number.

        Raises:
            ValueError: fewer than 2.
        """
        if num_sms < 2:
            raise ValueError(f"num_sms: expected at least 2, got {num_sms} (VLLM_DBO_COMM_SMS)")
        self.num_sms = 0 if num_sms >= _multiprocessors() else num_sms - num_sms % 2

    def query_active_mask(self) -> torch.Tensor:
        """``[W]`` int32 on the device: 1 for each rank that this one leaves out, else 0."""
        return self.traffic.mask(self.world_size, _device())

    def query_fault(self) -> torch.Tensor:
        """A bool on the device: whether that has changed since the last recovery. No host waits."""
        mask = self.query_active_mask()
        if self._last_mask is None:
            self._last_mask = torch.zeros_like(mask)
        return (mask != self._last_mask).any()

    def clean_buffers(self) -> None:
        """Brings all ranks back into step after a fault, and leaves out none. Collective.

        Raises:
            RuntimeError: on the first rank, of those that have not come within the timeout.
        """
        self.traffic.bring_back()
        self._last_mask = None

    def destroy(self) -> None:
        """Closes groups and communicator."""
        self.traffic.close()


def _device() -> torch.device:
    """The device that this rank computes on."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _multiprocessors() -> int:
    """The number that the device has; without a device, more than there can be."""
    device = _device()
    if device.type == "cpu":
        return 1 << 30
    return torch.cuda.get_device_properties(device).multi_processor_count
