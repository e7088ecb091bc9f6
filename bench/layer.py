"""Times the routed experts of a layer, `xd.moe`, by its schedules, beside their parts and bounds.

    python bench/layer.py [--ranks 2] [--shapes E,A,B] [--passes forward,fp8,backward,step]
                          [--json FILE]

Each pass is timed twice. Cool: alone, 40 ms after the one before, all ranks at once. Hot: without
pauses, schedules in turn, several times over, after as many passes of the same that do not count:
a device that gets hot slows down for a second, and would favour the first. A time is the median of
the slowest rank's, between two events that were enqueued ahead, so no time of the host is in it;
but a step of `MoELayer`, which is eager, has what the host takes longer than the device. The clock
of rank 0's multiprocessors (nvidia-smi) during a measurement stands beside it.

The routing is uniform and random. A forward pass has prepare in it. Rows of the tables:

    serial, N parts  `xd.moe`, and the multiprocessors of transfers beside products; outputs of all
                     schedules are compared, bit for bit, before
    1 part           backward: only the products for gradients of matrices run beside a transfer
    auto             the schedule that `xd_moe_schedule` chooses; the serial one is timed once more
    operators        `xd.dispatch`, products by torch (backward: by `xd.grouped_mm`), `xd.combine`
    products         those of the pass alone, on rows that have arrived
    transfers        prepare and the operations alone; with 16 multiprocessors, also in parts
    bound            perfect overlap: prepare and products, and the time of 132 multiprocessors that
                     transfers take, for which they run with 16

fp8 has no schedule by parts: the table shows rows of fp8 and products in fp8 one after another, and
what overlap could make of them. Tokens and matrices are rounded before, activations on the way. A
step is the forward and backward pass of `MoELayer` in bfloat16, with router and balancing loss.

Shapes are those of 2 GPUs: in E transfers weigh as much as on 8 ranks, A has few rows of many
experts, B is between them. `--device cpu --shapes tiny` shows that the program works, not times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

import crossdock.torch as xd
from crossdock import launch
from crossdock.torch import grouped
from crossdock.torch.gated import FUSED, gated
from crossdock.torch.layers.overlap import resolve

SHAPES = {  # tokens of a rank, K, experts of all ranks, columns of a token, columns in an expert
    "E": (16384, 2, 64, 7168, 1536),
    "A": (4096, 8, 256, 7168, 2048),
    "B": (4096, 8, 64, 7168, 2048),
    "tiny": (64, 2, 16, 128, 64),
}
MULTIPROCESSORS, FEW = 132, 16
HOT_ROUNDS = 3
Calls = dict[str, Callable[[], object]]


class Clock:
    """The clock of a GPU's multiprocessors, as nvidia-smi tells it every 20 ms."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []
        self._program: subprocess.Popen[str] | None = None
        if not torch.cuda.is_available():
            return
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        command = ["nvidia-smi", f"--id=GPU-{device.uuid}"]
        command += ["--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-lms", "20"]
        try:
            self._program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._program is not None and self._program.stdout is not None
        for line in self._program.stdout:
            if line.strip().isdigit():
                self._seen.append((time.perf_counter(), int(line)))

    def during(self, windows: list[tuple[float, float]]) -> int | None:
        """The median in MHz; None: it is not known."""
        seen = [mhz for when, mhz in self._seen if any(a <= when <= b for a, b in windows)]
        return int(statistics.median(seen)) if seen else None

    def close(self) -> None:
        if self._program is not None:
            self._program.terminate()
            self._program.wait()


class Stopwatch:
    """Microseconds of calls, on a device or on the CPU."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device, self._clock = device, clock

    def cool(self, call: Callable[[], object], number: int) -> tuple[float, int | None]:
        def one() -> float:
            time.sleep(0.04)
            dist.barrier()
            return self._times(call, 1)[0]

        one()
        begin = time.perf_counter()
        slowest = self._slowest([one() for _ in range(number)])
        return slowest, self._clock.during([(begin, time.perf_counter())])

    def hot(self, calls: Calls, number: int) -> dict[str, tuple[float, int | None]]:
        """Of each of the calls, `number` passes in each of some rounds."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        windows: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for round in range(1 + HOT_ROUNDS):  # the first one only heats
            for name, call in calls.items():
                dist.barrier()
                self._times(call, number)
                begin = time.perf_counter()
                taken = self._times(call, number)
                if round > 0:
                    times[name] += taken
                    windows[name].append((begin, time.perf_counter()))
        return {
            name: (self._slowest(times[name]), self._clock.during(windows[name])) for name in calls
        }

    def _times(self, call: Callable[[], object], number: int) -> list[float]:
        if self._device.type == "cpu":
            return [_seconds(call) * 1e6 for _ in range(number)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * number)]
        torch.cuda._sleep(4_000_000)  # 2 ms, in which the host gets ahead
        for begin, end in zip(events[::2], events[1::2]):
            begin.record()
            call()
            end.record()
        events[-1].synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in zip(events[::2], events[1::2])]

    def _slowest(self, times: list[float]) -> float:
        all_times = torch.tensor(times, device=self._device, dtype=torch.float64)
        dist.all_reduce(all_times, dist.ReduceOp.MAX)
        return all_times.median().item()


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Layer:
    """The tensors of one shape on this rank, and the calls that are timed."""

    def __init__(self, name: str, comm: xd.Comm, device: torch.device) -> None:
        tokens, topk, experts, hidden, ffn = SHAPES[name]
        self.comm, self.ffn, self.topk = comm, ffn, topk
        # Room for uneven routing, but not for any: what lies behind the last row costs time.
        rows = int(1.15 * tokens * topk) + 64
        self.group = xd.EpGroup(
            num_experts=experts,
            max_topk=topk,
            max_tokens_per_rank=tokens,
            hidden=hidden,
            recv_capacity=rows // 16 * 16,
            zero_tail=False,
            symmetric_tensors=24,
            comm=comm,
        )
        self.groups = [self.group]
        local = self.group.num_local_experts
        torch.manual_seed(comm.rank)
        self.idx = torch.rand(tokens, experts, device=device).topk(topk).indices.int()
        self.weights = torch.rand(tokens, topk, device=device)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16) * scale

        self.x, self.grad = random(tokens, hidden), random(tokens, hidden)
        self.w_in = random(local, hidden, 2 * ffn, scale=hidden**-0.5)
        self.w_out = random(local, ffn, hidden, scale=ffn**-0.5)

    def schedules(self, *more: xd.Overlap) -> dict[str, xd.Overlap | None]:
        """The serial one, some in parts, and auto's, by name."""
        chosen: dict[str, xd.Overlap | None] = {"serial": None}
        for one in (*more, xd.Overlap(2, 16), xd.Overlap(4, 16), xd.Overlap(4, 32)):
            chosen[_name(one)] = one
        auto = resolve("auto", self.group, self.topk, self.ffn)
        return chosen | {f"auto: {_name(auto) if auto else 'serial'}": auto}

    def prepare(self, overlap: xd.Overlap | None = None) -> xd.Plan:
        return self.group.prepare(self.idx, parts=1 if overlap is None else overlap.parts)

    def moe(self, plan: xd.Plan, overlap: xd.Overlap | None) -> torch.Tensor:
        given = (plan, self.x, self.weights, self.w_in, self.w_out)
        return xd.moe(*given, overlap=False if overlap is None else overlap)

    def whole(self, overlap: xd.Overlap | None) -> torch.Tensor:
        return self.moe(self.prepare(overlap), overlap)

    def transfers(self, sms: int = 0) -> torch.Tensor:
        plan = self.prepare()
        received = xd.dispatch(plan, self.x, self.weights, num_sms=sms)
        return xd.combine(plan, received.tokens, received.weights, num_sms=sms)

    def transfers_in_parts(self, parts: int, sms: int) -> torch.Tensor:
        plan = self.group.prepare(self.idx, parts=parts)
        received: xd.Dispatched | None = None
        for part in range(1, parts + 1):
            received = xd.dispatch(plan, self.x, self.weights, part=part, num_sms=sms, out=received)
        assert received is not None
        out: torch.Tensor | None = None
        for part in range(1, parts + 1):
            rows = received.tokens
            out = xd.combine(plan, rows, received.weights, part=part, num_sms=sms, out=out)
        assert out is not None
        return out

    def experts(self, plan: xd.Plan, rows: torch.Tensor, by_torch: bool = False) -> torch.Tensor:
        def product(a: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
            if by_torch and grouped._GROUPED_MM is not None and a.is_cuda:
                return grouped._GROUPED_MM(a, matrices, offs=plan.offsets[1:])
            return xd.grouped_mm(a, matrices, plan.offsets)

        inner = product(rows, self.w_in)
        return product(gated(inner, plan.offsets, "silu", group=self.group.handle), self.w_out)

    def operators(self, plan: xd.Plan, by_torch: bool) -> torch.Tensor:
        received = xd.dispatch(plan, self.x, self.weights)
        return xd.combine(plan, self.experts(plan, received.tokens, by_torch), received.weights)

    # ---- The calls of each pass ------------------------------------------------------------------

    def forward(self) -> Calls:
        plan = self.prepare()
        rows = xd.dispatch(plan, self.x, self.weights).tokens
        schedules = self.schedules()
        calls: Calls = {name: partial(self.whole, overlap) for name, overlap in schedules.items()}
        outputs = [self.whole(overlap) for overlap in schedules.values()]
        assert all(torch.equal(outputs[0], one) for one in outputs[1:]), "outputs differ"
        return calls | {
            "operators": lambda: self.operators(self.prepare(), True),
            "products": lambda: self.experts(plan, rows),
            "transfers": partial(self.transfers, 0),
            f"transfers, {FEW} SMs": partial(self.transfers, FEW),
            f"transfers, 4 parts, {FEW} SMs": partial(self.transfers_in_parts, 4, FEW),
            "prepare": self.prepare,
        }

    def backward(self) -> Calls:
        tensors = [self.x, self.weights, self.w_in, self.w_out]
        for tensor in tensors:
            tensor.requires_grad_()

        def retained(
            out: torch.Tensor, of: list[torch.Tensor]
        ) -> Callable[[], tuple[torch.Tensor, ...]]:
            return lambda: torch.autograd.grad(out, of, self.grad, retain_graph=True)

        calls: Calls = {}
        serial: tuple[torch.Tensor, ...] | None = None
        for name, overlap in self.schedules(xd.Overlap(1, FEW)).items():
            calls[name] = call = retained(self.whole(overlap), tensors)
            gradients = call()
            serial = serial or gradients
            assert all(map(torch.equal, serial, gradients)), f"gradients of {name} differ"
        del serial, gradients
        calls["operators"] = retained(self.operators(self.prepare(), False), tensors)
        calls["products"] = self.products_of_backward()
        calls["transfers"] = retained(self.transfers(), tensors[:2])
        return calls

    def products_of_backward(self) -> Callable[[], object]:
        with torch.no_grad():
            plan = self.prepare()
            rows = xd.dispatch(plan, self.x, self.weights).tokens
            inner = xd.grouped_mm(rows, self.w_in, plan.offsets)
            activated = gated(inner, plan.offsets, "silu", group=self.group.handle)
        offsets, grads = plan.offsets, torch.empty_like(rows)
        grads.copy_(rows)
        w_in, w_out = self.w_in.detach(), self.w_out.detach()

        def outer(a: torch.Tensor, b: torch.Tensor, like: torch.Tensor) -> None:
            given = {"a": a, "b": b, "offsets": offsets, "d": torch.empty_like(like)}
            grouped._calls.run(self.comm.core, "grouped_outer", a, given)

        def products() -> None:
            grad = grouped.run_product(self.comm, grads, w_out.transpose(1, 2), offsets)
            grad_inner, _ = torch.ops.crossdock.gated_bwd(
                grad, inner, offsets, None, FUSED["silu"], self.group.handle
            )
            grouped.run_product(self.comm, grad_inner, w_in.transpose(1, 2), offsets)
            outer(activated, grads, w_out)
            outer(rows, grad_inner, w_in)

        return products

    def step(self) -> Calls:
        """Of one layer, whose schedule is changed before each pass."""
        tokens, hidden = self.x.shape
        layer = xd.MoELayer(
            hidden,
            self.ffn,
            self.group.num_experts,
            self.topk,
            comm=self.comm,
            max_tokens_per_rank=tokens,
            recv_capacity=self.group.rows,
            dtype=self.x.dtype,
        )
        self.groups.append(layer.group)
        x = self.x.detach().requires_grad_()

        def call(overlap: xd.Overlap | None) -> None:
            layer.overlap = overlap
            layer.zero_grad(set_to_none=True)
            x.grad = None
            output = layer(x)
            torch.autograd.backward([output.hidden, output.aux_loss], [self.grad, None])

        schedules = self.schedules(xd.Overlap(1, FEW))
        return {name: partial(call, overlap) for name, overlap in schedules.items()}

    def fp8(self) -> Calls:
        code = torch.float8_e4m3fn
        device, tokens = self.x.device, self.x.shape[0]
        x, scales = self.x.to(code), torch.ones(tokens, 1, device=device)
        # Columns of matrices are packed in fp8.
        matrices = [
            w.to(code).transpose(1, 2).contiguous().transpose(1, 2) for w in self._weights()
        ]
        b_scales = [torch.ones(w.shape[0], w.shape[2], device=device) for w in matrices]
        a_scale = torch.ones(self.group.rows, device=device)

        def dispatch(plan: xd.Plan, sms: int = 0) -> xd.Dispatched:
            return xd.dispatch(plan, x, self.weights, scales=scales, num_sms=sms)

        def experts(plan: xd.Plan, received: xd.Dispatched) -> torch.Tensor:
            def product(a: torch.Tensor, a_scale: torch.Tensor, which: int) -> torch.Tensor:
                given = {"a_scale": a_scale, "b_scale": b_scales[which]}
                return grouped.run_product(self.comm, a, matrices[which], plan.offsets, **given)

            assert received.scales is not None
            inner = product(received.tokens, received.scales.flatten(), 0)
            activated = gated(inner, plan.offsets, "silu", group=self.group.handle)
            return product(activated.to(code), a_scale, 1)

        def serial() -> torch.Tensor:
            plan = self.prepare()
            received = dispatch(plan)
            return xd.combine(plan, experts(plan, received), received.weights)

        plan = self.prepare()
        received = dispatch(plan)
        out = experts(plan, received)

        def transfers(sms: int = 0) -> torch.Tensor:
            plan = self.prepare()
            weights = dispatch(plan, sms).weights
            return xd.combine(plan, out, weights, num_sms=sms)

        return {
            "serial": serial,
            "products": lambda: experts(plan, received),
            "transfers": transfers,
            f"transfers, {FEW} SMs": lambda: transfers(FEW),
            "prepare": self.prepare,
        }

    def _weights(self) -> Iterator[torch.Tensor]:
        yield self.w_in.detach()
        yield self.w_out.detach()


def _name(overlap: xd.Overlap) -> str:
    parts = "1 part" if overlap.parts == 1 else f"{overlap.parts} parts"
    return f"{parts}, {overlap.sms} SMs"


def bound(times: dict[str, float]) -> float | None:
    """Prepare, products, and the multiprocessors' time that transfers take from them."""
    taken = times.get(f"transfers, {FEW} SMs")
    if taken is None:
        return None
    moved = (taken - times["prepare"]) * FEW / MULTIPROCESSORS
    return times["prepare"] + times["products"] + moved


def report(shape: str, name: str, records: list[dict[str, object]]) -> None:
    serial = records[0]
    for record in records:
        cells = []
        for state in ("cool", "hot"):
            micros, base = record[f"{state}_us"], serial[f"{state}_us"]
            assert isinstance(micros, float) and isinstance(base, float)
            cells += [
                f"{micros:.0f}",
                f"{micros / base:.3f}",
                str(record.get(f"{state}_mhz") or ""),
            ]
        print(f"| {shape} | {name} | {record['what']} | {' | '.join(cells)} |", flush=True)


def measure(
    layer: Layer, shape: str, name: str, watch: Stopwatch, options: argparse.Namespace
) -> list[dict[str, object]]:
    with torch.set_grad_enabled(name in ("backward", "step")):
        calls: Calls = getattr(layer, name)()
    records: list[dict[str, object]] = []
    cool: dict[str, float] = {}
    hot: dict[str, float] = {}
    with torch.set_grad_enabled(name in ("backward", "step")):
        for what, call in calls.items():
            cool[what], cool_mhz = watch.cool(call, options.cool)
            records.append({"what": what, "cool_us": cool[what], "cool_mhz": cool_mhz})
        # Calls that leave a device time to cool down do not come between the others.
        most = max(cool.values()) / 2
        light = {what: call for what, call in calls.items() if cool[what] < most}
        heavy = {what: call for what, call in calls.items() if what not in light}
        both = watch.hot(heavy, options.hot) | watch.hot(light, options.hot)
        for record, what in zip(records, calls):
            hot[what], mhz = both[what]
            record |= {"hot_us": hot[what], "hot_mhz": mhz}
    bounds = bound(cool), bound(hot)
    if None not in bounds:
        records.append({"what": "bound", "cool_us": bounds[0], "hot_us": bounds[1]})
    if layer.comm.rank == 0:
        report(shape, name, records)
    return [{"shape": shape, "pass": name} | record for record in records]


def run_rank(rank: int, options: argparse.Namespace) -> None:
    device = torch.device(f"cuda:{rank}" if options.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
    )
    clock = Clock() if rank == 0 else None
    if rank == 0:
        columns = ("shape", "pass", "what", "cool, µs", "of serial", "MHz", "hot, µs")
        print(f"| {' | '.join((*columns, 'of serial', 'MHz'))} |")
        print("|---" * (len(columns) + 2) + "|", flush=True)
    file = Results(options) if options.json and rank == 0 else None
    try:
        with xd.init(device=device) as comm:
            watch = Stopwatch(device, clock or _NoClock())
            for shape in options.shapes.split(","):
                layer = Layer(shape, comm, device)
                for name in options.passes.split(","):
                    records = measure(layer, shape, name, watch, options)
                    if file is not None:
                        file.write(records)
                for group in layer.groups:
                    group.close()
                del layer
    finally:
        if clock is not None:
            clock.close()
    dist.destroy_process_group()


class Results:
    """A file of times, an object a line: what it says of their origin, and what was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path = options.json
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        shapes = {name: SHAPES[name] for name in options.shapes.split(",")}
        head = {
            "title": f"bench/layer.py: {options.ranks} processes, {options.device}",
            "date": datetime.date.today().isoformat(),
            "gpus": {"name": name, "count": options.ranks},
            "torch": torch.__version__,
            "ranks": options.ranks,
            "cool": options.cool,
            "hot": options.hot,
            "shapes": shapes,
        }
        with open(self._path, "w") as file:
            print(json.dumps(head), file=file)

    def write(self, records: list[dict[str, object]]) -> None:
        """Adds a pass, so that what has been measured stays if the program does not end."""
        with open(self._path, "a") as file:
            for record in records:
                rounded = {
                    key: round(value, 1) if isinstance(value, float) else value
                    for key, value in record.items()
                }
                print(json.dumps(rounded), file=file)


class _NoClock(Clock):
    def __init__(self) -> None:
        self._seen, self._program = [], None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", default="E,A,B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--passes", default="forward,fp8,backward,step")
    parser.add_argument("--cool", type=int, default=9, help="passes with pauses")
    parser.add_argument("--hot", type=int, default=15, help="passes without, in each round")
    parser.add_argument("--json", help="file for the times")
    options = parser.parse_args()
    launch.run(options.ranks, run_rank, options)


if __name__ == "__main__":
    main()
