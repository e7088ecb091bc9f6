"""A model of expert parallelism between machines, event by event over chunks.

It answers how long a dispatch or a combine would take on machines that nobody here has, and what
bounds it. Sources cut their rows for each other machine into chunks, gateways deliver them
(docs/internals/machines.md); a rank has a processor, which packs, delivers and adds up, and a
network interface. All of them do one thing after another. Routing counts by its expectation, so
that every rank of a machine does the same.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["Machines", "Problem", "Result", "Shares", "Wire", "shares_of", "simulate"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The tokens of each rank, their experts and their rows."""

    hosts: int
    ranks_per_host: int
    tokens: int = 4096
    topk: int = 8
    experts: int = 256
    row_bytes: int = 14336
    routing: str = "uniform"  # or zipf:S, expert e with weight 1 / (e + 1)^S
    histogram: Sequence[float] = ()  # weights of experts, in the place of `routing`
    host_limit: int = 0  # a token's experts lie on at most so many machines; 0 = any

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.hosts * self.ranks_per_host

    def weights(self) -> list[float]:
        """How often each expert is chosen, unless a token has it already."""
        if self.histogram:
            if len(self.histogram) != self.experts:
                raise ValueError(
                    f"the histogram has {len(self.histogram)} experts, expected {self.experts}"
                )
            return list(self.histogram)
        if self.routing == "uniform":
            return [1.0] * self.experts
        if self.routing.startswith("zipf:"):
            exponent = float(self.routing.removeprefix("zipf:"))
            return [(e + 1) ** -exponent for e in range(self.experts)]
        raise ValueError(f"routing = {self.routing!r}, expected uniform or zipf:S")


@dataclasses.dataclass(frozen=True)
class Wire:
    """A network interface."""

    bytes_per_s: float  # of payload
    latency_s: float  # of a smallest message, from one rank's call to the other's
    messages_per_s: float = math.inf
    in_flight_bytes: float = 16 << 20  # bytes that a rank lets be under way
    incast_penalty: float = 0.0  # added time of a chunk that follows another sender's


@dataclasses.dataclass(frozen=True)
class Machines:
    """The speeds and buffers of the machines."""

    wire: Wire
    near_bytes_per_s: float  # a rank's processor copies, or adds up, so many
    wire_per_rank: bool = True  # otherwise the ranks of a host share one
    slots: int = 2
    chunk_bytes: int = 256 << 10
    command_s: float = 0.0  # of the processor: a put
    arrival_s: float = 0.0  # and a chunk or credit that has come


@dataclasses.dataclass(frozen=True)
class Shares:
    """Of a token: how likely it has rows on each host, and on how many ranks there."""

    hosts: list[float]
    ranks_if_any: list[float]


@dataclasses.dataclass(frozen=True)
class Result:
    """The times and amounts of a simulation."""

    seconds: float
    entry_s: float  # until all ranks know of each other
    rows_s: float  # until the last row is delivered
    rest_s: float  # until all slots are free
    wire_bytes: float  # of the busiest interface
    messages: int  # messages of that interface, credits included
    bound: str  # the work that takes longest by itself: wire, near or latency


def shares_of(problem: Problem, samples: int = 2000, seed: int = 1) -> Shares:
    """Expected shares of a token: exact for uniform routing, else by drawing tokens."""
    per_host, per_rank = problem.experts // problem.hosts, problem.experts // problem.ranks
    if per_rank == 0 or problem.experts % problem.ranks:
        raise ValueError(
            f"experts = {problem.experts}, expected a multiple of {problem.ranks}, the ranks"
        )
    if problem.routing == "uniform" and not problem.histogram and not problem.host_limit:
        ways = math.comb(problem.experts, problem.topk)
        host, rank = (
            1 - math.comb(problem.experts - part, problem.topk) / ways
            for part in (per_host, per_rank)
        )
        return Shares(
            [host] * problem.hosts, [problem.ranks_per_host * rank / host] * problem.hosts
        )
    rng = random.Random(seed)
    hosts, ranks = [0.0] * problem.hosts, [0.0] * problem.hosts
    draw = _drawing(problem, rng)
    for _ in range(samples):
        of_host: dict[int, int] = {}
        for touched in {e // per_rank for e in draw()}:
            host_of = touched // problem.ranks_per_host
            of_host[host_of] = of_host.get(host_of, 0) + 1
        for h, count in of_host.items():
            hosts[h] += 1 / samples
            ranks[h] += count / samples
    return Shares(hosts, [r / h if h else 0.0 for r, h in zip(ranks, hosts)])


def _drawing(problem: Problem, rng: random.Random) -> Callable[[], list[int]]:
    """A function that draws a token's experts; with a limit, first its hosts, all alike."""
    weights, per_host = problem.weights(), problem.experts // problem.hosts
    limit = min(problem.host_limit, problem.hosts)

    def draw() -> list[int]:
        experts: Sequence[int] = range(problem.experts)
        if limit:
            hosts = rng.sample(range(problem.hosts), limit)
            experts = [e for h in hosts for e in range(h * per_host, (h + 1) * per_host)]
        # The largest of u^(1/w), or of log(u) / w: without replacement.
        keys = {e: math.log(1 - rng.random()) / weights[e] for e in experts if weights[e] > 0}
        return heapq.nlargest(problem.topk, keys, key=keys.__getitem__)

    return draw


class _Server:
    """Does one thing after another."""

    def __init__(self) -> None:
        self.free, self.busy = 0.0, 0.0

    def take(self, now: float, seconds: float) -> float:
        """When something that comes now is done."""
        self.free = max(self.free, now) + seconds
        self.busy += seconds
        return self.free


@dataclasses.dataclass
class _Flow:
    """Chunks of one sender to one receiver."""

    sender: int
    receiver: int
    chunks: deque[tuple[int, float]]  # items, bytes
    slots: int
    pack_s: float  # of the sender's processor, for an item
    deliver_s: float  # of the receiver's


class _Simulation:
    def __init__(self, problem: Problem, machines: Machines) -> None:
        self.m = machines
        # The rails of ranks with wires of their own do not meet.
        self.rails = 1 if machines.wire_per_rank else problem.ranks_per_host
        self.now, self.last = 0.0, 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0  # of events: those of one moment happen in the order of at()
        ranks = range(problem.hosts * self.rails)
        self.processors = [_Server() for _ in ranks]
        self.out, self.into = ([_Server() for _ in range(problem.hosts)] for _ in range(2))
        self.sent_bytes, self.sent = [0.0] * problem.hosts, [0] * problem.hosts
        self.last_from = [-1] * problem.hosts
        self.in_flight = [0.0 for _ in ranks]
        self.blocked: list[deque[_Flow]] = [deque() for _ in ranks]
        # By sender: its chunks in the order in which it fills them; empty = in any order.
        self.lines: list[deque[_Flow]] = [deque() for _ in ranks]

    def wire_of(self, rank: int) -> int:
        """The interface of a rank: one for each host, as rails are alike or share it."""
        return rank // self.rails

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Something happens then."""
        self.count += 1
        heapq.heappush(self.events, (when, self.count, what))

    def run(self) -> None:
        """Until nothing happens any more."""
        while self.events:
            self.now, _, what = heapq.heappop(self.events)
            what()

    def transmit(self, sender: int, receiver: int, size: float, landed: Callable[[], None]) -> None:
        """Over both interfaces; the bytes pass both at once, if these are idle."""
        wire, a, b = self.m.wire, self.wire_of(sender), self.wire_of(receiver)
        seconds = max(size / wire.bytes_per_s, 1 / wire.messages_per_s)
        done = self.out[a].take(self.now, seconds)
        self.sent_bytes[a] += size
        self.sent[a] += 1
        crowded = self.into[b].free > done - seconds + wire.latency_s
        penalty = wire.incast_penalty if crowded and self.last_from[b] != a else 0.0
        self.last_from[b] = a
        arrived = self.into[b].take(done - seconds + wire.latency_s, seconds * (1 + penalty))
        self.at(arrived, landed)

    def start(self, flow: _Flow) -> None:
        """Goes on with a flow, while there are slots."""
        line = self.lines[flow.sender]
        if not line:
            while flow.slots > 0 and flow.chunks and self.pack(flow):
                pass
        # A chunk without a slot keeps all behind it waiting.
        while line and line[0].slots > 0 and self.pack(line[0]):
            line.popleft()

    def pack(self, flow: _Flow) -> bool:
        """Packs the next chunk of a flow, and sends it; False = too much is under way."""
        items, size = flow.chunks[0]
        if self.in_flight[flow.sender] + size > max(self.m.wire.in_flight_bytes, size):
            self.blocked[flow.sender].append(flow)
            return False
        flow.chunks.popleft()
        flow.slots -= 1
        self.in_flight[flow.sender] += size
        packed = self.processors[flow.sender].take(self.now, items * flow.pack_s + self.m.command_s)
        self.at(packed, functools.partial(self.send, flow, items, size))
        return True

    def send(self, flow: _Flow, items: int, size: float) -> None:
        """A packed chunk goes."""
        self.transmit(flow.sender, flow.receiver, size, lambda: self.deliver(flow, items, size))

    def deliver(self, flow: _Flow, items: int, size: float) -> None:
        """A chunk has come: its rows are stored, or added up, and its slot goes back."""
        done = self.processors[flow.receiver].take(
            self.now, items * flow.deliver_s + self.m.arrival_s
        )
        self.last = max(self.last, done)
        self.in_flight[flow.sender] -= size
        waiting = self.blocked[flow.sender]
        for _ in range(len(waiting)):
            other = waiting.popleft()
            self.at(self.now, functools.partial(self.start, other))
        self.at(done, lambda: self.give_back(flow))

    def give_back(self, flow: _Flow) -> None:
        """An empty put back. Links go packet by packet: it does not wait for chunks of others."""
        wire = self.m.wire
        self.sent[self.wire_of(flow.receiver)] += 1
        there = self.now + wire.latency_s + 1 / wire.messages_per_s
        self.at(there, lambda: self.credited(flow))

    def credited(self, flow: _Flow) -> None:
        """The slot is free."""
        flow.slots += 1
        self.start(flow)


def _flows(
    problem: Problem, machines: Machines, shares: Shares, *, rails: int, combines: bool
) -> list[_Flow]:
    """In the order in which a rank begins them: the next host first.

    A rank works for its near ranks in between, with the rows of the same tokens: in a dispatch
    those that it packs, in a combine those that come.
    """
    item = problem.row_bytes + 4 * problem.topk + (16 if combines else 0)
    room = max(machines.chunk_bytes // item, 1)
    row_s = problem.row_bytes / machines.near_bytes_per_s
    items_of = [round(problem.tokens * share) for share in shares.hosts]
    flows = []
    for rank in range(problem.hosts * rails):
        home, rail = divmod(rank, rails)
        far_items = max(sum(items_of) - items_of[home], 1)
        near_rows = problem.tokens * shares.hosts[home] * shares.ranks_if_any[home]
        own_s = near_rows / far_items * row_s
        for step in range(1, problem.hosts):
            host = (home + (-step if combines else step)) % problem.hosts
            other, items = host * rails + rail, items_of[host]
            sizes = [room] * (items // room) + ([items % room] if items % room else [])
            chunks = deque((n, float(n * item)) for n in sizes or [0])
            there_s = shares.ranks_if_any[host] * row_s
            if combines:  # rows are read there, and the sum is added up here
                flow = _Flow(other, rank, chunks, machines.slots, there_s, row_s + own_s)
            else:
                flow = _Flow(rank, other, chunks, machines.slots, row_s + own_s, there_s)
            flows.append(flow)
    if combines:
        flows.sort(key=lambda flow: flow.sender)
    return flows


def simulate(
    problem: Problem, machines: Machines, operation: str = "dispatch", shares: Shares | None = None
) -> Result:
    """One operation on all ranks, which begin together."""
    if operation not in ("dispatch", "combine"):
        raise ValueError(f"operation = {operation!r}, expected dispatch or combine")
    shares = shares or shares_of(problem)
    simulation = _Simulation(problem, machines)
    partners = problem.hosts - 1
    latency = machines.wire.latency_s if partners else 0.0
    entry = latency + partners * (machines.command_s + machines.arrival_s)
    combines = operation == "combine"
    # Requests are one message more.
    begin = entry + (latency + partners * machines.command_s if combines else 0.0)
    if not partners:
        rows = problem.tokens * shares.hosts[0] * shares.ranks_if_any[0]
        simulation.processors[0].take(0.0, rows * problem.row_bytes / machines.near_bytes_per_s)
    flows = _flows(problem, machines, shares, rails=simulation.rails, combines=combines)
    if not combines:  # tokens go in order, whatever hosts they go to
        for i in range(max((len(flow.chunks) for flow in flows), default=0)):
            for flow in flows:
                if i < len(flow.chunks):
                    simulation.lines[flow.sender].append(flow)
    for flow in flows:
        simulation.at(begin, functools.partial(simulation.start, flow))
    simulation.run()
    rows_end = max(simulation.last, *(p.free for p in simulation.processors))
    end = max(rows_end, simulation.now)
    busiest = max(range(len(simulation.out)), key=lambda w: simulation.sent_bytes[w])
    bounds = {
        "wire": max(s.busy for s in (*simulation.out, *simulation.into)),
        "near": max(p.busy for p in simulation.processors),
        "latency": 3 * latency,
    }
    return Result(
        seconds=end,
        entry_s=entry,
        rows_s=rows_end - entry,
        rest_s=end - rows_end,
        wire_bytes=simulation.sent_bytes[busiest],
        messages=simulation.sent[busiest],
        bound=max(bounds, key=bounds.__getitem__),
    )
