"""Seeded traces of operations with a planted fault, or with none: what ``everstep diagnose`` reads.

Ranks run the programs of a small training over dp, pp and tp: micro-batches through the stages, all
forward passes before the backward ones, with tensor-parallel calls inside the spans, an exchange of
each with each in the tensor-parallel group, buckets over dp, and a norm over all. A call ends a
little after its last member came; a rank waits for it. So a fault spreads as it does in a cluster.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final

from orchestrator.diagnosis import Operation
from orchestrator.driver import diagnose_paths
from workers.protocol import StepCost

#: (dp, pp, tp).
LAYOUTS: Final = ((4, 1, 1), (8, 1, 1), (3, 1, 2), (4, 2, 1), (3, 3, 1), (3, 1, 3), (4, 2, 2))
#: Two replicas, or one, whose own past has to decide.
FEW: Final = ((2, 2, 1), (2, 1, 3), (2, 2, 2), (1, 4, 1))

HANGS: Final = ("absent", "slow_data_hang", "link_dead", "device_stuck")
PROGRAMS: Final = ("mismatch", "mismatch_goes_on", "desync")
SLOW: Final = ("slow_compute", "slow_data", "slow_link", "slow_sender", "slow_receiver")
PLANTED: Final = (*HANGS, *PROGRAMS, *SLOW)
CLEAN: Final = ("jitter", "stages", "tokens", "tokens_unsaid", "recompiles", "pauses", "cut")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Rows of a trace, and what was planted in it."""

    rows: list[dict[str, Any]]
    kind: str  #: A kind of verdict, or "" if no rank is to blame.
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()  #: Each (sender, receiver).
    #: When a healthy run was looked at; None for a whole trace or a hang.
    now_s: float | None = None
    what: str = ""


@dataclass
class _Plan:
    """A fault of a run; ``victim`` is its rank, ``link`` its pair."""

    fault: str
    victim: int = -1
    link: tuple[int, int] = (-1, -1)
    onset: int = 0
    factor: float = 1.0
    jitter: float = 0.03
    uneven: str = ""
    says_sizes: bool = True
    call: int = 0
    wrong: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Call:
    comm: str
    members: tuple[int, ...]
    op: str
    size: int
    dtype: str = "bfloat16"


class _Job:
    """A run of ``num_steps`` on a layout."""

    def __init__(
        self, layout: tuple[int, int, int], num_steps: int, rng: Random, plan: _Plan
    ) -> None:
        self.dp, self.pp, self.tp = layout
        self.num_steps, self.rng, self.plan = num_steps, rng, plan
        self.num_ranks = self.dp * self.pp * self.tp
        self.num_batches = rng.choice((2, 3, 4))
        self.stage_s = [
            rng.uniform(0.7, 1.6) if plan.uneven == "stages" else 1.0 for _ in range(self.pp)
        ]
        self.rows: list[dict[str, Any]] = []
        self.sizes: dict[tuple[int, int, int], int] = {}

    def rank(self, d: int, p: int, t: int) -> int:
        return (d * self.pp + p) * self.tp + t

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp

    def size(self, d: int, step: int, batch: int) -> int:
        if not self.plan.uneven.startswith("tokens"):
            return 4096
        key = (d, step, batch)
        if key not in self.sizes:
            self.sizes[key] = int(4096 * self.rng.lognormvariate(0.0, 0.35))
        return self.sizes[key]

    def noise(self) -> float:
        return self.rng.lognormvariate(0.0, self.plan.jitter)

    # -- programs: spans as (op, seconds, size), calls as lists that are entered together

    def program(self, rank: int) -> Iterator[tuple[int, Any]]:
        d, p, t = self.place(rank)
        for step in range(self.num_steps):
            for batch in range(self.num_batches):
                if p == 0:
                    yield step, ("data", self.data_s(rank, step), self.size(d, step, batch))
                yield from ((step, each) for each in self.passed(rank, "forward", step, batch))
            for batch in range(self.num_batches):
                yield from ((step, each) for each in self.passed(rank, "backward", step, batch))
            same = tuple(self.rank(each, p, t) for each in range(self.dp))
            for op, size in (
                ("all_gather", 3),
                ("reduce_scatter", 5),
                ("all_reduce", 7),
                ("all_reduce", 9),
            ):
                if self.dp > 1:
                    yield step, [_Call(f"dp{p}.{t}", same, op, size << 20, "float32")]
            yield step, [_Call("world", tuple(range(self.num_ranks)), "all_reduce", 4, "float32")]
            yield step, ("optimizer", 0.02 * self.noise(), 0)

    def passed(self, rank: int, way: str, step: int, batch: int) -> Iterator[Any]:
        d, p, t = self.place(rank)
        forward = way == "forward"
        before, after = (p - 1, p + 1) if forward else (p + 1, p - 1)
        size = self.size(d, step, batch)
        if 0 <= before < self.pp:
            yield [self.transfer(self.rank(d, before, t), rank, rank, size)]
        whole_s = self.compute_s(rank, way, step, size)
        mates = tuple(self.rank(d, p, each) for each in range(self.tp))
        # The span stays open around the calls in it.
        yield ("begin", way, size)
        for part in range(2):
            yield ("work", whole_s / 2, 0)
            if self.tp > 1:
                yield [_Call(f"tp{d}.{p}", mates, "all_reduce", size * 8)]
            if self.tp > 2 and part == 0:
                yield [
                    self.transfer(a, b, rank, size * 4)
                    for a in mates
                    for b in mates
                    if a != b and rank in {a, b}
                ]
        yield ("end", way, size)
        if 0 <= after < self.pp:
            yield [self.transfer(rank, self.rank(d, after, t), rank, size)]

    def transfer(self, source: int, target: int, rank: int, size: int) -> _Call:
        op = "send" if rank == source else "recv"
        return _Call(f"pair{source}>{target}", (source, target), op, size * 16)

    # -- durations

    def data_s(self, rank: int, step: int) -> float:
        slow = (
            self.plan.fault == "slow_data" and rank == self.plan.victim and step >= self.plan.onset
        )
        return 0.002 * self.noise() + (
            0.1 * (self.plan.factor - 1.0) * self.noise() if slow else 0.0
        )

    def compute_s(self, rank: int, way: str, step: int, size: int) -> float:
        stage = self.stage_s[self.place(rank)[1]]
        usual_s: float = (
            (0.05 if way == "forward" else 0.1) * stage * (size / 4096) ** 1.2 * self.noise()
        )
        plan = self.plan
        if plan.fault == "slow_compute" and rank == plan.victim and step >= plan.onset:
            return usual_s * plan.factor
        if plan.uneven == "recompiles" and (step == 0 or self.rng.random() < 0.002):
            return usual_s + self.rng.uniform(0.5, 8.0)
        if plan.uneven == "pauses" and self.rng.random() < 0.001:
            return usual_s + 20.0
        return usual_s

    def call_s(self, call: _Call, step: int) -> float:
        plan = self.plan
        usual_s = (1e-4 + call.size / 1e9) * self.noise()
        if len(call.members) == 2 and step >= plan.onset:
            source, target = call.members
            slow = (
                (plan.fault == "slow_link" and call.members == plan.link)
                or (plan.fault == "slow_sender" and source == plan.victim)
                or (plan.fault == "slow_receiver" and target == plan.victim)
            )
            if slow and call.op in {"send", "recv"}:
                return usual_s + 0.02 * plan.factor * self.noise()
        return usual_s

    # -- the run

    def run(self) -> None:
        engine = _Engine(self)
        engine.run()
        self.rows = sorted(engine.rows, key=lambda row: (row["t_enter"], row["rank"]))


class _Engine:
    """Advances each rank until it waits; a call ends when all of its members are in it."""

    def __init__(self, job: _Job) -> None:
        self.job = job
        ranks = range(job.num_ranks)
        self.programs = {rank: job.program(rank) for rank in ranks}
        self.now = dict.fromkeys(ranks, 0.0)
        self.step = dict.fromkeys(ranks, 0)
        self.open: dict[int, dict[str, Any]] = {}
        self.waits: dict[int, list[dict[str, Any]]] = {}
        self.seqs: dict[tuple[int, str], int] = defaultdict(int)
        self.inside: dict[tuple[str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
        self.rows: list[dict[str, Any]] = []
        self.num_calls = dict.fromkeys(ranks, 0)
        self.dead: set[tuple[str, int]] = set()

    def run(self) -> None:
        ready = list(self.programs)
        while ready:
            rank = ready.pop()
            while rank in self.programs and not self.waits.get(rank):
                try:
                    step, what = next(self.programs[rank])
                except StopIteration:
                    del self.programs[rank]
                    break
                self.step[rank] = step
                if isinstance(what, tuple):
                    self.work(rank, *what)
                else:
                    ready += self.enter(rank, what)

    def row(self, rank: int, op: str, **known: Any) -> dict[str, Any]:
        d, p, t = self.job.place(rank)
        row = {
            "step": self.step[rank], "rank": rank, "dp": d, "pp": p, "tp": t, "op": op, "seq": 0,
            "comm": None, "comm_ranks": None, "t_enter": round(self.now[rank], 7), "t_exit": None,
            "bytes": 0, **known,
        }  # fmt: skip
        self.rows.append(row)
        return row

    def work(self, rank: int, op: str, what: Any, size: int) -> None:
        said = size if self.job.plan.says_sizes else 0
        if op == "begin":
            self.open[rank] = self.row(rank, what, bytes=said)
        elif op == "end":
            self.open.pop(rank)["t_exit"] = round(self.now[rank], 7)
        elif op == "work":
            self.now[rank] += what
        else:
            row = self.row(rank, op, bytes=said)
            if op == "data" and self.is_struck(rank, "slow_data_hang"):
                self.stop(rank)
                return
            self.now[rank] += what
            row["t_exit"] = round(self.now[rank], 7)

    def is_struck(self, rank: int, fault: str) -> bool:
        plan = self.job.plan
        return plan.fault == fault and rank == plan.victim and self.step[rank] >= plan.onset

    def stop(self, rank: int) -> None:
        self.programs.pop(rank, None)

    def enter(self, rank: int, calls: list[_Call]) -> list[int]:
        plan = self.job.plan
        if self.is_struck(rank, "absent") or self.is_struck(rank, "desync"):
            self.num_calls[rank] += 1
            if self.num_calls[rank] == plan.call:
                if plan.fault == "absent":
                    self.stop(rank)
                    return []
                if calls[0].comm.startswith("dp"):
                    return []
                self.num_calls[rank] -= 1
        rows = []
        for call in calls:
            self.seqs[rank, call.comm] += 1
            seq = self.seqs[rank, call.comm]
            row = self.row(
                rank, call.op, seq=seq, comm=call.comm, comm_ranks=list(call.members),
                bytes=call.size, dtype=call.dtype,
            )  # fmt: skip
            rows.append(row)
            self.strike(rank, call, row)
            self.inside[call.comm, seq][rank] = row
        self.waits[rank] = rows
        return [
            each
            for call, row in zip(calls, rows, strict=True)
            for each in self.end(call, row["seq"])
        ]

    def strike(self, rank: int, call: _Call, row: dict[str, Any]) -> None:
        plan = self.job.plan
        key = (call.comm, row["seq"])
        if (
            plan.fault == "link_dead"
            and call.members == plan.link
            and self.step[rank] >= plan.onset
        ):
            self.dead.add(key)
        wrong = self.is_struck(rank, "mismatch") or self.is_struck(rank, "mismatch_goes_on")
        if wrong and call.op in {"all_reduce", "reduce_scatter"} and call.comm.startswith("dp"):
            self.num_calls[rank] += 1
            if self.num_calls[rank] == plan.call:
                row.update(plan.wrong)
                if plan.fault == "mismatch":
                    self.dead.add(key)
        if self.is_struck(rank, "device_stuck") and len(call.members) > 2:
            self.num_calls[rank] += 1
            if self.num_calls[rank] >= plan.call:
                self.stop(rank)

    def end(self, call: _Call, seq: int) -> list[int]:
        inside = self.inside[call.comm, seq]
        if len(inside) < len(call.members) or (call.comm, seq) in self.dead:
            return []
        start = max(row["t_enter"] for row in inside.values())
        over = start + self.job.call_s(call, max(row["step"] for row in inside.values()))
        freed = []
        for rank, row in inside.items():
            if rank not in self.programs and self.is_struck(rank, "device_stuck"):
                continue
            row["t_exit"] = round(over + self.job.rng.uniform(0.0, 1e-5), 7)
            self.now[rank] = max(self.now[rank], row["t_exit"])
            self.waits[rank] = [each for each in self.waits[rank] if each["t_exit"] is None]
            if not self.waits[rank]:
                freed.append(rank)
        return freed


def planted(kind: str, seed: int) -> Trace:
    """Return a trace with a fault of ``kind``, one of ``PLANTED``."""
    rng = Random(f"{kind} {seed}")
    few = kind in {"slow_compute", "slow_data", "slow_link"} and rng.random() < 0.3
    layouts = [each for each in (FEW if few else LAYOUTS) if _can(kind, each)]
    layout = rng.choice(layouts)
    plan = _Plan(
        fault=kind,
        jitter=rng.choice((0.01, 0.03, 0.06)),
        uneven=rng.choice(("", "stages", "tokens")),
    )
    job = _Job(layout, 8 if kind in {*HANGS, *PROGRAMS} else 26, rng, plan)
    plan.onset = rng.randrange(2, 6) if job.num_steps < 20 else rng.randrange(8, 13)
    if kind in SLOW and not few and rng.random() < 0.3:
        plan.onset = 0
    plan.victim = rng.choice([rank for rank in range(job.num_ranks) if _may(kind, job, rank)])
    plan.link = rng.choice(_links(job) or [(-1, -1)])
    plan.call = rng.randrange(1, 4)
    plan.factor = rng.choice((1.5, 2.0, 3.0))
    plan.wrong = rng.choice(({"bytes": 24}, {"dtype": "int64"}, {"op": "broadcast"}))
    if kind == "mismatch_goes_on" and "bytes" in plan.wrong:
        # Libraries allow it, so it is no fault as long as nothing hangs.
        plan.wrong = {"dtype": "int64"}
    job.run()
    is_link = kind in {"link_dead", "slow_link"}
    return Trace(
        rows=job.rows,
        kind=kind.removesuffix("_hang").removesuffix("_goes_on"),
        ranks=() if is_link else (plan.victim,),
        links=(plan.link,) if is_link else (),
        what=f"{kind} {seed}: {layout} {plan}",
    )


def clean(kind: str, seed: int) -> Trace:
    """Return a trace without a fault, one of ``CLEAN``."""
    rng = Random(f"clean {kind} {seed}")
    layout = rng.choice((*LAYOUTS, *FEW))
    uneven = "tokens" if kind == "tokens_unsaid" else kind
    plan = _Plan(
        fault="",
        jitter=rng.choice((0.05, 0.1, 0.2)) if kind == "jitter" else rng.choice((0.01, 0.05)),
        uneven=uneven,
        says_sizes=kind != "tokens_unsaid",
    )
    job = _Job(layout, rng.randrange(10, 30), rng, plan)
    job.run()
    rows, now_s = job.rows, None
    if kind == "cut":
        now_s = rng.uniform(0.5, 0.99) * max(row["t_exit"] for row in rows)
        rows = [
            {**row, "t_exit": row["t_exit"] if row["t_exit"] <= now_s else None}
            for row in rows
            if row["t_enter"] <= now_s
        ]
    return Trace(rows=rows, kind="", now_s=now_s, what=f"{kind} {seed}: {layout} {plan}")


def _links(job: _Job) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for rank in range(job.num_ranks):
        d, p, t = job.place(rank)
        pairs += [(rank, job.rank(d, each, t)) for each in (p - 1, p + 1) if 0 <= each < job.pp]
        if job.tp > 2:
            pairs += [(rank, job.rank(d, p, each)) for each in range(job.tp) if each != t]
    return pairs


def _can(kind: str, layout: tuple[int, int, int]) -> bool:
    dp, pp, tp = layout
    if kind in {"link_dead", "slow_link"}:
        return pp > 1 or tp > 2
    if kind in {"slow_sender", "slow_receiver"}:
        return pp > 2 or tp > 2
    return dp > 2 if kind in {*PROGRAMS, "device_stuck"} else True


def _may(kind: str, job: _Job, rank: int) -> bool:
    _, p, _ = job.place(rank)
    if kind.startswith("slow_data"):
        return p == 0
    if kind in {"slow_sender", "slow_receiver"}:
        return job.tp > 2 or 0 < p < job.pp - 1
    return True


def rows_file(trace: Trace, path: Path) -> Path:
    """Write a trace as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in trace.rows), encoding="utf-8")
    return path


def answer(trace: Trace) -> list[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]]:
    """Return what ``everstep diagnose`` says of a trace: kind, ranks and links of each verdict."""
    with TemporaryDirectory() as folder:
        path = rows_file(trace, Path(folder) / "trace.jsonl")
        verdicts = diagnose_paths([str(path)], trace.now_s)
    return [(str(one.kind), one.guilty.ranks, one.guilty.links) for one in verdicts]


def straggler_operations(path: Path) -> tuple[Operation, ...]:
    """Return the compute in a trace of StragglerAnalysis: a row has step, ranks, begin, duration.

    Each step's times begin at 0.
    """
    import pyarrow.parquet as pq

    return tuple(
        Operation(
            rank=row["rank"],
            op=row["optype"].removesuffix("-compute"),
            enter_s=1e4 * row["step"] + row["start_ts"],
            exit_s=1e4 * row["step"] + row["start_ts"] + row["duration"],
            step=row["step"],
            place=(row["dp_rank"], row["stage"], 0),
        )
        for row in pq.read_table(path).to_pylist()
        if row["optype"] in {"forward-compute", "backward-compute"}
    )


def step_costs(trace: Trace) -> dict[int, dict[int, StepCost]]:
    """Return what each step took each rank, as digests tell of it: by step and rank."""
    own: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    calls: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in trace.rows:
        if row["comm"]:
            calls[row["step"], row["rank"]].append(row)
    for row in trace.rows:
        if not row["comm"]:
            begin, end, until = row["t_enter"], row["t_exit"], row["t_enter"]
            work = end - begin
            for call in calls[row["step"], row["rank"]]:
                if begin <= call["t_enter"] < end:
                    work -= max(0.0, call["t_exit"] - max(until, call["t_enter"]))
                    until = max(until, call["t_exit"])
            own[row["step"], row["rank"], row["op"]].append(work)
    costs: dict[int, dict[int, StepCost]] = defaultdict(dict)
    for step, rank in {(step, rank) for step, rank, _ in own}:
        compute = (min(own.get((step, rank, op), [0.0])) for op in ("forward", "backward"))
        data = own.get((step, rank, "data"), [0.0])
        costs[step][rank] = StepCost(step, sum(compute), sum(data) / len(data))
    return costs


def place_of(trace: Trace) -> list[tuple[int, int]]:
    """Return (stage, tp place) of each rank."""
    places = {row["rank"]: (row["pp"], row["tp"]) for row in trace.rows}
    return [places[rank] for rank in sorted(places)]
