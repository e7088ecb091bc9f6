"""One rank of a training run."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import crossdock.torch as xd

from .compare import FIRST_STEP, LOGITS, Parts
from .layers import make_layers
from .model import LanguageModel, Prediction
from .progress import Progress
from .settings import Settings
from .text import Text, batch_of_step, read_text

PROMPT = b"class Reader:\n\tdef read(self, "
_HELD_OUT_BATCHES = 4


def train(device: torch.device, settings: Settings) -> None:
    """The part of each rank: it trains, and rank 0 shows the result."""
    with Trainer(settings, device) as trainer:
        trainer.run()
        held_out = trainer.held_out_loss()
        text = trainer.sample() if settings.sample_bytes else b""
        if trainer.rank == 0:
            bits = held_out / math.log(2)
            print(f"Text never trained on: loss {held_out:.4f} per byte ({bits:.2f} bits)")
        if text:
            print("What it has learnt to write:")
            shown = text.decode(errors="replace").expandtabs(4)
            print("\n".join(f"    | {line}" for line in shown.splitlines()))


class Trainer:
    """Trains on one rank; a context manager.

    All ranks make one and call the same methods in the same order.

    Data-parallel in everything but the experts, and perhaps attention: each rank has its part of
    the batch, and rank d the experts ``d * L .. d * L + L - 1``.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        settings.check(self.ranks)
        torch.manual_seed(settings.seed)
        self.text: Text = read_text(settings.text)
        self._comms = contextlib.ExitStack()
        layers = make_layers(settings, device, self._comms)
        s = settings
        self.model = LanguageModel(s.hidden, s.heads, s.layers, layers).to(device)
        self.optimizer = torch.optim.AdamW(
            xd.parameter_groups(self.model),
            settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
        )
        self.step = 0

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._comms.close()

    # ---- Training --------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains to the last step; logs each step, shows progress, saves checkpoints."""
        s = self.settings
        if s.resume:
            self._resume()
        with contextlib.ExitStack() as stack:
            log = progress = None
            if self.rank == 0:
                s.folder.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(_open_log(s.folder / "log.jsonl", self.step))
                progress = stack.enter_context(Progress(self._title(), s.steps, self.step))
            while self.step < s.steps:
                record = self.train_step()
                if log is not None:
                    print(json.dumps(record), file=log, flush=True)
                    progress.show(record)
                if s.save_every and self.step % s.save_every == 0:
                    self.save()

    def train_step(self) -> dict[str, Any]:
        """One step of the optimiser; its record, equal on all ranks except for the time."""
        s = self.settings
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = s.learning_rate * self._rate()
        inputs, targets = self._batch(self.text.train, s.seed, self.step)
        prediction = self.model(inputs)
        loss = _cross_entropy(prediction, targets)
        self.optimizer.zero_grad()
        (loss + prediction.aux_loss).backward()
        if not s.plain:
            xd.average_gradients(self.model)
        if s.save_first_step and self.step == 0:
            self._save_first_step(prediction.logits)
        self.optimizer.step()
        losses = self._mean(torch.stack((loss.detach(), prediction.aux_loss.detach())))
        record = {
            "step": self.step,
            "loss": losses[0].item(),
            "aux_loss": losses[1].item(),
            "load": prediction.load.tolist(),
            "seconds": time.perf_counter() - start,
            "tokens": s.sequences * s.context,
        }
        self.step += 1
        return record

    def _rate(self) -> float:
        """Factor of the learning rate: up in a line, then down to a tenth as a cosine."""
        s = self.settings
        steps = s.schedule_steps or s.steps
        up = min(1.0, (self.step + 1) / s.warmup)
        done = min(1.0, self.step / steps)
        return up * (0.55 + 0.45 * math.cos(math.pi * done))

    def _batch(self, data: torch.Tensor, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.settings
        pair = batch_of_step(data, seed, step, s.sequences, s.context, self.rank, self.ranks)
        return pair[0].to(self.device), pair[1].to(self.device)

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        """Over ranks; overwrites ``values``."""
        if self.ranks > 1:
            dist.all_reduce(values)
        return values.div_(self.ranks)

    def _title(self) -> str:
        if self.settings.plain:
            return "1 process, plain PyTorch"
        return f"{self.ranks} rank{'s' if self.ranks > 1 else ''}, Crossdock"

    # ---- Its results -----------------------------------------------------------------------------

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss per byte of text that was never trained on, in nats."""
        losses = []
        for batch in range(_HELD_OUT_BATCHES):
            inputs, targets = self._batch(self.text.held_out, self.settings.seed + 1, batch)
            losses.append(_cross_entropy(self.model(inputs), targets))
        return self._mean(torch.stack(losses).mean()).item()

    @torch.no_grad()
    def sample(self) -> bytes:
        """Text that the model goes on with after the prompt, on rank 0; empty on the others.

        The other ranks have no tokens of their own then, and only serve their experts; but ranks
        that share attention have equally many sequences.
        """
        generator = torch.Generator().manual_seed(self.settings.seed)
        sequences = 1 if self.rank < self.settings.tensor_parallel else 0
        text = torch.tensor(list(PROMPT)).expand(sequences, -1)
        for _ in range(self.settings.sample_bytes):
            recent = text[:, -self.settings.context :]
            logits = self.model(recent.to(self.device)).logits[:, -1].float().cpu()
            odds = torch.softmax(logits / 0.7, dim=-1)
            if sequences:
                following = torch.multinomial(odds, 1, generator=generator)
            else:
                following = text[:, :1]
            text = torch.cat((text, following), dim=1)
        return bytes(text.flatten().tolist()) if self.rank == 0 else b""

    # ---- Files -----------------------------------------------------------------------------------

    def save(self) -> None:
        """A checkpoint of this step in the run's folder; all ranks together."""
        path = self.settings.folder / f"step-{self.step:06d}"
        dcp.save(self._state(), checkpoint_id=path)

    def _state(self) -> dict[str, Any]:
        """All that a checkpoint has, as it is now."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "step": self.step,
            "random": torch.get_rng_state(),
            "text": self.text.checksum,
        }

    def _resume(self) -> None:
        path = last_checkpoint(self.settings.folder)
        if path is None:
            return
        state = self._state()
        mistake = None  # of the user, which every rank finds
        try:
            dcp.load(state, checkpoint_id=path)
        except CheckpointException as error:
            mistake, _ = next(iter(error.failures.values()))
        if state["text"] != self.text.checksum:
            mistake = f"{path} was trained on another text than is here"
        if mistake:
            raise SystemExit(f"--resume: {mistake}" if self.rank == 0 else 1)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        # A step's batch depends on seed and step alone, so the step is the place in the data too.
        self.step = state["step"]
        torch.set_rng_state(state["random"])

    def _save_first_step(self, logits: torch.Tensor) -> None:
        s, ranks = self.settings, self.ranks
        experts = dict.fromkeys(xd.expert_parameters(self.model), Parts(0, ranks))
        heads = {}
        if s.tensor_parallel > 1:
            for block in self.model.blocks:
                heads[block.attention.qkv.weight] = Parts(0, s.tensor_parallel)
                heads[block.attention.out.weight] = Parts(1, s.tensor_parallel)
        parts = experts | heads
        tensors = {
            name: (*parts.get(parameter, Parts(0, 1)), xd.local_tensor(parameter.grad).cpu())
            for name, parameter in self.model.named_parameters()
        }
        tensors[LOGITS] = (*Parts(0, ranks), logits.detach().cpu())
        s.folder.mkdir(parents=True, exist_ok=True)
        torch.save(tensors, s.folder / f"{FIRST_STEP}-{self.rank}.pt")


def last_checkpoint(folder: Path) -> Path | None:
    """The complete one of the highest step."""
    found = [file.parent for file in folder.glob("step-[0-9]*[0-9]/.metadata")]
    return max(found, default=None)


def _cross_entropy(prediction: Prediction, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(prediction.logits.flatten(0, 1), targets.flatten())


def _open_log(path: Path, step: int) -> Any:
    """The log, cut to the steps before ``step``: those after it are about to be done again."""
    kept = []
    if step and path.exists():
        kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] < step]
    path.write_text("".join(line + "\n" for line in kept))
    return path.open("a")
