"""Launchers that start several ranks without saying so in torchrun's words."""

from __future__ import annotations

import os

# Launcher, its variable for the number of ranks, and that for this process's number.
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("MPICH's or Intel's mpiexec", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("srun", "SLURM_NTASKS", "SLURM_PROCID"),
)


def require_no_other_launcher() -> None:
    """Refuses to be one rank of one where a launcher has started more.

    Raises:
        RuntimeError: names the launcher and what to do.
    """
    for launcher, size, rank in _LAUNCHERS:
        number, count = os.environ.get(rank, ""), os.environ.get(size, "")
        if launcher == "srun" and not _in_step(number, size):
            continue
        if number.isdecimal() and count.isdecimal() and int(count) > 1:
            _refuse(f"{launcher} has started {count} ranks ({size})", number, count, size)
    number = os.environ.get("PMIX_RANK", "")
    if number.isdecimal() and int(number) > 0:
        _refuse(
            f"this is rank {number} of several (PMIX_RANK)", number, "their number", "PMIX_RANK"
        )


def _in_step(number: str, size: str) -> bool:
    """Whether srun started this process: a batch script's process also has Slurm's variables."""
    if "SLURM_STEP_ID" in os.environ:
        # The shell of an interactive step has the number of tasks of its allocation.
        return size == "SLURM_STEP_NUM_TASKS" or "SLURM_STEP_NUM_TASKS" not in os.environ
    return number.isdecimal() and int(number) > 0


def _refuse(what: str, number: str, count: str, unset: str) -> None:
    raise RuntimeError(
        f"init: {what}, and this would be a communicator of one. Initialise torch.distributed "
        f"first; or set RANK (here {number}), WORLD_SIZE ({count}), LOCAL_RANK, MASTER_ADDR and "
        f"MASTER_PORT as torchrun does; or start the ranks with torchrun. Unset {unset} where one "
        "rank is meant"
    )
