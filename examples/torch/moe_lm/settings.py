"""The settings of a training run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from .options import check_model, check_positive


@dataclass(frozen=True)
class Settings:
    """All that decides a run; equal on all ranks."""

    folder: Path  # log, checkpoints
    steps: int = 200
    seed: int = 1
    sequences: int = 16  # per step, over all ranks
    context: int = 128  # bytes per sequence
    hidden: int = 128
    heads: int = 4
    layers: int = 4
    ffn: int = 256
    experts: int = 8
    topk: int = 2
    tensor_parallel: int = 1  # ranks that share attention, each some of the heads
    combine_wire: str = "same"  # the form in which experts' results come back
    aux_loss_weight: float = 0.05
    learning_rate: float = 3e-3
    warmup: int = 20  # steps
    schedule_steps: int | None = None  # where the rate has come down; None = the last step
    save_every: int = 0  # steps between checkpoints; 0 = none
    resume: bool = False  # from the last checkpoint in the folder, if there is one
    plain: bool = False  # without Crossdock, in one process
    device: str = "auto"  # auto, cpu or cuda
    text: Path | None = None  # folder of .py files; None = the standard library's
    sample_bytes: int = 300  # of text at the end; 0 = none
    save_first_step: bool = False  # its logits and gradients, for a comparison

    def check(self, ranks: int) -> None:
        """Raises ValueError, naming the option, if ``ranks`` ranks cannot run this."""
        check_model(self, ranks)
        if self.experts % ranks:
            raise ValueError(f"--experts {self.experts}: expected a multiple of {ranks}, the ranks")
        self._check_tensor_parallel(ranks)
        if self.plain and (ranks != 1 or self.save_every or self.resume):
            raise ValueError("--plain: expected --ranks 1, no --save-every and no --resume")

    def _check_tensor_parallel(self, ranks: int) -> None:
        check_positive(self, "tensor_parallel")
        shared = self.tensor_parallel
        for name, value in (("ranks", ranks), ("heads", self.heads)):
            if value % shared:
                raise ValueError(
                    f"--{name} {value}: expected a multiple of {shared}, for --tensor-parallel"
                )
        if shared > 1 and self.hidden % (4 * shared):
            raise ValueError(
                f"--hidden {self.hidden}: expected a multiple of {4 * shared}, 16 bytes on each "
                "rank, for --tensor-parallel"
            )

    def replace(self, **changes: object) -> Settings:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)
