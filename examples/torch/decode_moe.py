#!/usr/bin/env python3
"""Decodes with a small mixture-of-experts model whose experts are spread over ranks.

    torchrun --nproc-per-node 2 decode_moe.py            on GPUs if each rank has one, or CPUs
    torchrun --nproc-per-node 2 decode_moe.py --graph    every step is the replay of one CUDA graph

A rank's sequences are two micro-batches: while the rows of one travel, the rank computes with the
other. In the end each rank decodes its sequences again, alone, with all experts and without
Crossdock, and compares the logits of every step. Exit code 1 if they disagree.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys

import torch
import torch.nn.functional as F

import crossdock.torch as xd

VOCABULARY, HIDDEN, FFN, EXPERTS, TOPK, LAYERS = 64, 128, 96, 8, 3, 3
SEQUENCES, STEPS = 3, 24  # of a micro-batch; tokens of each
LARGEST_ERROR = 1e-4  # between logits: sums in float32 have another order


class Layer:
    """A stand-in for attention, which remembers what a sequence has seen; a router; experts.

    Every rank draws the numbers of all experts, and keeps those of `experts`.
    """

    def __init__(self, experts: range, generator: torch.Generator, device: torch.device) -> None:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device) / shape[-2] ** 0.5

        self.mixer, self.router = draw(HIDDEN, HIDDEN), draw(HIDDEN, EXPERTS)
        inner, outer = draw(EXPERTS, HIDDEN, 2 * FFN), draw(EXPERTS, FFN, HIDDEN)
        self.inner, self.outer = inner[list(experts)], outer[list(experts)]

    def attend(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """[T,H] x and what the sequences' memory, which this renews, adds to it."""
        memory.mul_(0.7).add_(F.rms_norm(x, (HIDDEN,)) @ self.mixer)
        return x + memory

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows for the experts, the experts of each, and their weights."""
        rows = F.rms_norm(x, (HIDDEN,))
        weights, idx = (rows @ self.router).softmax(-1).topk(TOPK)
        return rows, idx, weights

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        """[L,S,H] results of the experts of the L that this rank has; also of empty slots."""
        gate, up = torch.bmm(rows, self.inner).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * up, self.outer)


class Model:
    """Layers between an embedding and its transpose. Equal on all ranks but for the experts."""

    def __init__(self, experts: range, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(device)
        self.layers = [Layer(experts, generator, device) for _ in range(LAYERS)]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[T,VOCABULARY] of the next tokens."""
        return F.rms_norm(x, (HIDDEN,)) @ self.embedding.T / HIDDEN**0.5


@dataclasses.dataclass
class MicroBatch:
    """Sequences that are decoded together: their next tokens, and each layer's memory of them."""

    tokens: torch.Tensor  # [T]
    memory: torch.Tensor  # [LAYERS,T,H]
    logits: torch.Tensor  # [T,VOCABULARY], of the latest step

    @classmethod
    def starting(cls, seed: int, device: torch.device) -> MicroBatch:
        """Sequences of one token."""
        generator = torch.Generator().manual_seed(seed)
        return cls(
            torch.randint(VOCABULARY, (SEQUENCES,), generator=generator).to(device),
            torch.zeros(LAYERS, SEQUENCES, HIDDEN, device=device),
            torch.zeros(SEQUENCES, VOCABULARY, device=device),
        )


def step(model: Model, batches: list[MicroBatch], group: xd.LowLatencyGroup) -> None:
    """Renews every micro-batch's logits and tokens. The same calls on all ranks."""
    hidden = [model.embedding[batch.tokens] for batch in batches]
    for number, layer in enumerate(model.layers):
        sent = []
        for i, batch in enumerate(batches):
            hidden[i] = layer.attend(hidden[i], batch.memory[number])
            # The rows leave. While they travel, this rank computes with the other batch.
            sent.append(xd.ll_dispatch_send(group, *layer.route(hidden[i])))
        returning = []
        for one in sent:
            slots = one.receive()
            returning.append(xd.ll_combine_send(slots.plan, layer.compute(slots.tokens)))
        for i, one in enumerate(returning):
            hidden[i] = hidden[i] + one.receive()
    for x, batch in zip(hidden, batches):
        batch.logits.copy_(model.logits(x))
        batch.tokens.copy_(batch.logits.argmax(-1))


def decode(
    model: Model, batches: list[MicroBatch], group: xd.LowLatencyGroup, graph: bool
) -> list[torch.Tensor]:
    """[micro-batches * T, VOCABULARY] logits of every step."""

    def run() -> None:
        step(model, batches, group)

    if graph:
        run = captured(model, batches, group).replay
    logits = []
    for _ in range(STEPS):
        run()
        logits.append(torch.cat([batch.logits for batch in batches]))
    if group.comm.device.type == "cuda":
        torch.cuda.synchronize()
        group.check()
    return logits


def captured(
    model: Model, batches: list[MicroBatch], group: xd.LowLatencyGroup
) -> torch.cuda.CUDAGraph:
    """A step as a graph, which has not moved the sequences on."""
    before = [(batch.tokens.clone(), batch.memory.clone()) for batch in batches]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(model, batches, group)  # as torch wants it: libraries set themselves up
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, batches, group)
    for batch, (tokens, memory) in zip(batches, before):
        batch.tokens.copy_(tokens)
        batch.memory.copy_(memory)
    return graph


def decode_alone(model: Model, batch: MicroBatch, followed: list[torch.Tensor]) -> torch.Tensor:
    """The largest difference from `followed`, the logits of each step, whose tokens it takes."""
    largest = torch.zeros((), device=batch.tokens.device)
    for logits in followed:
        x = model.embedding[batch.tokens]
        for number, layer in enumerate(model.layers):
            x = layer.attend(x, batch.memory[number])
            rows, idx, weights = layer.route(x)
            results = layer.compute(rows.expand(EXPERTS, -1, -1))
            chosen = results[idx, torch.arange(len(x), device=x.device)[:, None]]
            x = x + (chosen * weights[..., None]).sum(1)
        largest = torch.maximum(largest, (model.logits(x) - logits).abs().max())
        batch.tokens.copy_(logits.argmax(-1))
    return largest


def main() -> int:
    """Decodes, checks, and says what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="replay a CUDA graph")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    comm = xd.init(device=None if torch.cuda.device_count() >= ranks else "cpu")
    device, rank = comm.device, comm.rank
    if options.graph and device.type != "cuda":
        parser.error("--graph: needs a GPU per rank")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("highest")
    local = EXPERTS // comm.num_ranks
    with torch.no_grad():
        group = xd.LowLatencyGroup(
            num_experts=EXPERTS,
            max_topk=TOPK,
            max_tokens_per_rank=SEQUENCES,
            hidden=HIDDEN,
            dtype=torch.float32,
        )
        model = Model(range(rank * local, (rank + 1) * local), device)
        seeds = [100 + 2 * rank, 101 + 2 * rank]
        batches = [MicroBatch.starting(seed, device) for seed in seeds]
        logits = decode(model, batches, group, options.graph)
        whole = Model(range(EXPERTS), device)
        largest = 0.0
        for number, seed in enumerate(seeds):
            part = slice(number * SEQUENCES, (number + 1) * SEQUENCES)
            alone = MicroBatch.starting(seed, device)
            error = decode_alone(whole, alone, [one[part] for one in logits])
            largest = max(largest, float(error))
    agree = largest <= LARGEST_ERROR
    words = "agree" if agree else "DISAGREE"
    print(f"rank {rank}: {STEPS} steps {words} with one process, to {largest:.1e}\n", end="")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
