"""The settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_lm.options import check_model, check_positive


@dataclass(frozen=True)
class Settings:
    """All that decides a run; equal in all processes."""

    folder: Path  # log and figure
    data: int = 2  # ranks along the mesh's axis "data"
    experts_axis: int = 2  # ranks along the mesh's axis "expert"
    tensor_parallel: bool = False  # whether these also share the attention of their sequences
    steps: int = 100
    seed: int = 1
    sequences: int = 16  # per step, over all ranks
    context: int = 64  # bytes per sequence
    hidden: int = 64
    heads: int = 4
    layers: int = 2
    ffn: int = 128
    experts: int = 8
    topk: int = 2
    aux_loss_weight: float = 0.05
    learning_rate: float = 6e-3
    warmup: int = 10  # steps
    text: Path | None = None  # folder of .py files; None = the standard library's

    @property
    def ranks(self) -> int:
        """Devices of the mesh."""
        return self.data * self.experts_axis

    def check(self) -> None:
        """Raises ValueError, naming the option, if the mesh cannot run this."""
        for name in ("data", "experts_axis"):
            check_positive(self, name)
        check_model(self, self.ranks)
        if self.hidden % 4:
            raise ValueError(f"--hidden {self.hidden}: expected a multiple of 4, 16 bytes")
        if self.tensor_parallel:
            self._check_parts()
        if self.experts % self.experts_axis:
            raise ValueError(
                f"--experts {self.experts}: expected a multiple of {self.experts_axis}, the ranks "
                'along "expert"'
            )

    def _check_parts(self) -> None:
        """Checks the sizes that the ranks along "expert" share in attention."""
        for name in ("context", "heads"):
            if getattr(self, name) % self.experts_axis:
                raise ValueError(
                    f"--{name} {getattr(self, name)}: expected a multiple of {self.experts_axis}, "
                    'the ranks along "expert", for --tensor-parallel'
                )
        if self.hidden % (4 * self.experts_axis):
            raise ValueError(
                f"--hidden {self.hidden}: expected a multiple of {4 * self.experts_axis}, 16 bytes "
                "on each rank, for --tensor-parallel"
            )
