"""Helpers of the training tests: small settings, and one rank's run of them."""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import crossdock.torch as xd
from moe_lm.settings import Settings
from moe_lm.trainer import Trainer
from support import Rank

REPOSITORY = pathlib.Path(__file__).parents[3]
TEXT = pathlib.Path(sysconfig.get_paths()["stdlib"]) / "asyncio"


def small(folder: pathlib.Path, **changes: Any) -> Settings:
    """A model and batches so small that a step takes milliseconds."""
    settings = Settings(
        folder=folder,
        steps=6,
        sequences=4,
        context=16,
        hidden=32,
        heads=2,
        layers=2,
        ffn=16,
        experts=8,
        topk=2,
        warmup=2,
        text=TEXT,
        device="cpu",
        sample_bytes=0,
    )
    return dataclasses.replace(settings, **changes)


class Outcome(NamedTuple):
    """One rank's end of a run."""

    parameters: dict[str, Any]  # this rank's parameters, by name
    held_out: float  # loss
    sample: bytes


def run(me: Rank, settings: Settings) -> Outcome:
    """Trains on this rank, on the CPU or, if the settings say "cuda", on the GPU of its number."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", me.rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if settings.device == "cuda" else "gloo")
    try:
        with Trainer(settings, device) as trainer:
            trainer.run()
            parameters = trainer.model.named_parameters()
            return Outcome(
                {
                    name: xd.local_tensor(value).detach().cpu().numpy().copy()
                    for name, value in parameters
                },
                trainer.held_out_loss(),
                trainer.sample() if settings.sample_bytes else b"",
            )
    finally:
        dist.destroy_process_group()
