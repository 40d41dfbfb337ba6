"""Print what users read about a run in the terminal.

``RunView`` follows a run: with a live line in a terminal, with plain lines elsewhere. Each function
prints one document: the status, a recovery plan, the bounds of waits, a list of runs.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import IO, Any, Final, Self, TypeAlias

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from orchestrator.core import ACTIVE, suspects_shown
from orchestrator.driver.layout_plan import LayoutPlan
from orchestrator.driver.traffic_plan import TrafficPlan
from orchestrator.policies import Forecast, RecoveryPlan
from orchestrator.report import what_it_does, what_survives
from ucp_core.numerics import counted, format_bytes

#: Without a terminal, a line of progress is printed this often.
PLAIN_LINE_S = 5.0
#: How much of a node's id to show: enough to recognise it, and for ``everstep plan --lose``.
_NODE_CHARS = 8
#: A recovery that takes longer is shown while it lasts; most take less than a second.
_USUAL_S = 3.0
#: Period at which a wait is printed again.
_WAIT_LINE_S = 30.0
#: Phases without training.
_WAITS = frozenset({"waiting", "forming", "fencing", "reading"})
_LOST = r"\b(lost|has failed|failed:)(?! from)|^problem:|^failed\b"
_DOUBTFUL = r"\b(slow|draining|dying)\b|^(suspected|notice|passed over):|refused \d+"
#: From this duration on, times are shown in whole seconds.
_SECONDS_SHORT = 100
#: The columns of a table: by title, a function that returns a cell's text from its row.
_Columns: TypeAlias = Mapping[str, Callable[[Any], str]]


def open_console(*, stderr: bool = False) -> Console:
    """Return a console that redraws lines in a terminal only.

    Notebooks and CI set FORCE_COLOR, and then rich takes every stream for a terminal.
    """
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, force_interactive=None if stream.isatty() else False)


def say(console: Console, text: str) -> None:
    """Print ``text`` without markup: messages of peers and of the system contain brackets."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


class RunView:
    """Shows the status documents of the run ``title`` as they come, and its script's output."""

    def __init__(self, console: Console, *, title: str, total_steps: int) -> None:
        self._console = console
        self._title = title
        self._total = total_steps
        self._said: dict[str, Any] = {}
        self._printed_s = float("-inf")
        self._step = 0
        #: Causes that were printed before their incidents were recorded.
        self._causes: list[Mapping[str, Any]] = []
        #: Numbers of incidents that are printed or older than the view; None before a status.
        self._incidents: set[int] | None = None
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            # One line, however narrow the terminal: a redraw would not erase a second line.
            TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_interactive,
        )
        self._task = self._progress.add_task(title, total=total_steps, facts="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def file(self) -> IO[str]:
        """Return the stream to which the view prints."""
        return self._console.file

    def show(self, status: dict[str, Any] | None) -> None:
        """Show one status document; None means that the controller does not answer."""
        if status is None:
            # A controller that has just started answers slowly, which is not a problem.
            if self._incidents is not None:
                continues = "; training continues without it" if "attempt" in self._said else ""
                self._say("controller", f"the controller does not answer{continues}")
            return
        if self._incidents is None:
            newest = max((one["number"] for one in status["incidents"]), default=0)
            self._incidents = set(range(newest + 1))
        if self._said.pop("controller", None):
            self.say("the controller answers again")
        for (machine, notice), line in _notices(status).items():
            self._say(f"notice {machine}", line, key=notice)
        self._progress.update(
            self._task, completed=status["step"], facts=_facts(status, is_short=True)
        )
        self._say_cause(status["cause"])
        self.say_incidents(status["incidents"])
        self._say_lost(status)
        self._say_wait(status)
        self._say_problems(status)
        if status["phase"] == "training":
            for line in status["passed_over"]:
                self._say(f"skipped {line}", f"skipped {line}", key=status["attempt"])
            self._say("attempt", _attempt_line(status), key=status["attempt"])
        now_s = time.monotonic()
        is_news = status["step"] != self._step and now_s - self._printed_s >= PLAIN_LINE_S
        if not self._console.is_interactive and is_news:
            self._printed_s, self._step = now_s, status["step"]
            self.say(f"step {status['step']}/{self._total}  {_facts(status)}")

    def _say_cause(self, cause: Mapping[str, Any] | None) -> None:
        """Print the cause of the last change, and again if a better one is found."""
        if cause is None:
            return
        line = _cause_line(cause)
        if self._say("cause", line, key=(cause["at_s"], line)):
            self._causes.append(cause)

    def say_incidents(self, incidents: Iterable[Mapping[str, Any]]) -> None:
        """Print new incidents, except those whose cause was printed."""
        for one in incidents:
            if self._incidents is None or one["number"] in self._incidents:
                continue
            self._incidents.add(one["number"])
            for index, cause in enumerate(self._causes):
                if _explains(cause, one):
                    del self._causes[: index + 1]
                    break
            else:
                self.say(_cause_line(one))

    def _say_lost(self, status: Mapping[str, Any]) -> None:
        """Print the nodes that are lost, unless the cause of the attempt's end names them."""
        cause = status["cause"]
        told = "" if cause is None else cause["evidence"]
        for node in status["nodes"]:
            name = f"node {node['node'][:_NODE_CHARS]}"
            if node["state"] != "lost":
                self._said.pop(name, None)
            elif name in told:
                self._said[name] = True
            else:
                self._say(name, f"{name} is lost", style="red")

    def _say_wait(self, status: Mapping[str, Any]) -> None:
        """Print what the run waits for when that changes, and repeat it every ``_WAIT_LINE_S``."""
        if status["phase"] not in _WAITS:
            self._said.pop("waits", None)
            return
        if status["phase"] != "waiting" and (status["phase_for_s"] or 0.0) < _USUAL_S:
            return
        what, since = what_it_does(status), _since(status)
        # Its numbers may change all the time.
        kind, now_s = re.sub(r"\d+", "", what), time.monotonic()
        said, said_s = self._said.get("waits", ("", 0.0))
        if kind != said or now_s - said_s >= _WAIT_LINE_S:
            self._said["waits"] = kind, now_s
            self.say(f"{what}{since}")

    def _say_problems(self, status: Mapping[str, Any]) -> None:
        """Print problems that are new; their numbers may change all the time."""
        for what, line in _suspected(status).items():
            self._say(f"suspects {what}", f"suspected: {line}")
        for topic in ("redundancy", "cadence"):
            found = status.get(topic, {}).get("problems", ())
            kinds = {re.sub(r"[0-9a-f]*\d[0-9a-f]*", "", problem): problem for problem in found}
            for kind in kinds.keys() - self._said.get(topic, frozenset()):
                self.say(f"problem: {kinds[kind]}")
            self._said[topic] = frozenset(kinds)

    def say(self, text: str, *, style: str = "") -> None:
        """Print one line above the live display."""
        line = Text.assemble((self._title, "dim"), "  ", (text, style))
        self._progress.console.print(line, soft_wrap=True)

    def print(self, line: str) -> None:
        """Print a line of the training script unchanged above the live display."""
        self._progress.console.print(Text(line), soft_wrap=True)

    def _say(self, topic: str, text: str, *, key: Any = True, style: str = "") -> bool:
        """Print ``text`` once for each ``key`` of its topic; return whether it was printed now."""
        is_new = bool(self._said.get(topic) != key)
        if is_new:
            self._said[topic] = key
            self.say(text, style=style)
        return is_new


def _facts(status: Mapping[str, Any], *, is_short: bool = False) -> str:
    """Return the known numbers of a run, the most important first.

    With ``is_short`` they fit in a line of 80 columns beside a bar.
    """
    cost, is_training = status["cost"]["usd"], status["phase"] == "training"
    facts = [
        *([] if is_training else [f"{status['phase']}{_since(status)}"]),
        *_progress(status, is_short=is_short),
        *([] if cost is None else [f"${cost:.2f}"]),
        counted(len(status["workers"]), "worker"),
    ]
    return (" " if is_short else "  ").join(facts)


def _progress(status: Mapping[str, Any], *, is_short: bool = False) -> Iterator[str]:
    """Yield loss, validation loss, rate and time left, if known."""
    digits, per_s = (3, "/s") if is_short else (4, " steps/s")
    for name, key in (("loss", "loss"), ("val", "validation_loss")):
        if status[key] is not None:
            yield f"{name} {status[key]:.{digits}f}"
    if status["steps_per_s"] and status["phase"] in ACTIVE:
        yield f"{status['steps_per_s']:.3g}{per_s}"
        yield f"ETA {_clock((status['goal'] - status['step']) / status['steps_per_s'])}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _since(status: Mapping[str, Any]) -> str:
    """Return how long the run has been in its phase; "" if for less than a second."""
    phase_for_s = status["phase_for_s"]
    return f" (for {_duration(round(phase_for_s))})" if phase_for_s and phase_for_s >= 1 else ""


def _cause_line(cause: Mapping[str, Any]) -> str:
    guilty = f" ({', '.join(cause['guilty'])})" if cause["guilty"] else ""
    evidence = f": {cause['evidence']}" if cause["evidence"] else ""
    return f"{cause['kind']}{guilty}{evidence}"


def _explains(cause: Mapping[str, Any], incident: Mapping[str, Any]) -> bool:
    """Return whether ``incident`` is that of ``cause``; its evidence may say more."""
    is_same = (cause["kind"], *cause["guilty"]) == (incident["kind"], *incident["guilty"])
    return is_same and cause["evidence"] in incident["evidence"]


def _attempt_line(status: dict[str, Any]) -> str:
    pids = [str(worker["pid"]) for worker in status["workers"]]
    return (
        f"attempt {status['attempt']} trains on {counted(len(pids), 'worker')} "
        f"({status['layout']}), pids {' '.join(pids)}"
        + (f"; loaded {_sources_text(status['loaded'])}" if status["loaded"] else "")
    )


def _sources_text(sources: Mapping[str, int]) -> str:
    return ", ".join(f"{format_bytes(size)} from {name}" for name, size in sources.items())


def print_plan(plan: RecoveryPlan, console: Console) -> None:
    """Print what would happen if machines were lost."""
    lines = [f"lost: {', '.join((*plan.lost_nodes, *plan.lost_workers)) or 'nothing'}"]
    redone = f"{counted(plan.lost_steps, 'step')} to redo"
    if plan.step:
        lines.append(
            f"resumes after step {plan.step} of attempt {plan.attempt}, from {plan.source}; "
            f"{redone}"
        )
        lines.append(f"loads {_sources_text(plan.bytes_by_source)}")
    else:
        lines.append(f"restarts from step 0: no state is left anywhere; {redone}")
    lines += [
        f"  part of rank {part.rank}: {format_bytes(part.size_bytes)} from {part.source}"
        + (f" of node {part.node}" if part.node else "")
        for part in plan.parts
    ]
    step = f", about {_duration(plan.step_s_after)} a step" if plan.step_s_after else ""
    after = f"{plan.workers_after} ({plan.layout_after}{step})"
    if not plan.workers_after:
        after = "too few left\ntraining waits for new capacity"
    lines.append(f"workers: {plan.workers_before} now, then {after}")
    say(console, "\n".join(lines))


def print_node_plans(plans: Sequence[RecoveryPlan], console: Console) -> None:
    """Print what would happen if one node were lost, a line for each node."""
    say(console, "\n".join(_lines(_NODE_PLAN, plans)))


def print_layouts(plan: LayoutPlan, console: Console) -> None:
    """Print the layouts in which the hardware could train, a line for each."""
    job, room = plan.job, plan.layouts[0][0].room_bytes
    batch = job.num_micro_batches * job.num_tokens
    say(
        console,
        f"{plan.num_parameters / 1e9:.1f} B parameters, {batch:,} tokens a step, "
        f"{plan.num_nodes} x {plan.node_size} {plan.gpu}; from data sheets, not measured"
        + (f"; kept: {plan.kept}" if plan.kept else "")
        + ("" if job.chunks_loss else "; the loss of your own model holds all logits"),
    )
    rows = [
        (
            str(one.layout),
            _duration(one.step_s),
            f"{one.mfu:.0%}",
            f"{format_bytes(one.memory_bytes)} of {format_bytes(room)}",
            f"{one.bubble:.0%}",
            format_bytes(one.state_bytes),
            _options_text(one),
            why,
        )
        for one, why in plan.layouts
    ]
    columns = ("layout", "step", "MFU", "memory", "stages wait", "state each", "with", "why")
    say(console, "\n".join(_table((columns, *rows))))
    after = plan.after_loss
    if after is None:
        say(console, "without one node: nothing fits, so the run waits for another one")
    else:
        say(
            console,
            f"without one node: {after.layout}, {_duration(after.step_s)} a step; each worker "
            f"loads at most {format_bytes(after.state_bytes)}, {_duration(plan.load_s)} by the "
            "network",
        )
    say(console, plan.loss_text)
    if plan.recheck_cost:
        say(console, plan.recheck_cost)
    if plan.traffic is not None:
        _print_traffic(plan.traffic, console)


def _options_text(one: Forecast) -> str:
    """Return the choices by which a layout differs from the defaults."""
    options = {
        "recompute": one.recomputes,
        "reshard_after_forward: false": not one.reshards,
        f"stages_per_worker: {one.stages_per_worker}": one.stages_per_worker > 1,
        "a sum after each pass": one.reduces,
    }
    return ", ".join(text for text, is_used in options.items() if is_used) or "-"


def _print_traffic(plan: TrafficPlan, console: Console) -> None:
    say(console, f"\ntraffic of {plan.layout} between nodes, without what computation hides:")
    rows = [(row.what, row.plan, _duration(row.took_s), row.busiest) for row in plan.rows]
    say(console, "\n".join(_table((("what", "plan", "takes", "busiest link"), *rows))))
    say(
        console,
        f"a step communicates {plan.gain:.3g} times as fast with ranks on "
        f"{', '.join(plan.order)}; copies arrive {plan.copies_gain:.3g} times as fast over "
        "all paths. The switches choose the paths of NCCL",
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < _SECONDS_SHORT else f"{seconds:,.0f} s"


def print_bounds(bounds_s: Mapping[str, float], patience: float, console: Console) -> None:
    """Print the bound of every wait, as it is before the first step."""
    say(
        console,
        f"bounds of waits before the first step (recovery.patience={patience:g}; later bounds "
        f"follow from the steps): {_bounds_text(bounds_s)}",
    )


def _bounds_text(bounds_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {bound_s:g} s" for name, bound_s in bounds_s.items())


def print_runs(runs: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a list of runs (``orchestrator.driver.listing.list_runs``)."""
    if not runs:
        say(console, "no runs; --address or RAY_ADDRESS names a cluster elsewhere")
        return
    say(console, "\n".join(_lines(_RUN, runs)))


def print_status(status: Mapping[str, Any], console: Console, *, verbose: bool = False) -> None:
    """Print a status document (``orchestrator.driver.status.read_status``)."""
    lines = (*_head(status), *_tables(status), "", *_details(status, verbose=verbose))
    for line in lines:
        console.print(_coloured(line), soft_wrap=True)


def status_view(status: Mapping[str, Any], *, verbose: bool = False) -> Group:
    """Return a status document for a live display, which cuts tables at the end of the screen."""
    lines = (*_head(status), "", *_details(status, verbose=verbose), *_tables(status))
    return Group(*map(_coloured, lines))


def _coloured(line: str) -> Text:
    text = Text(line)
    text.highlight_regex(_LOST, "bold red")
    text.highlight_regex(_DOUBTFUL, "yellow")
    return text


def _head(status: Mapping[str, Any]) -> Iterator[str]:
    yield _headline(status)
    yield from (f"  not {one['layout']}: {one['why']}" for one in status.get("other_layouts", ()))
    if status["phase"] in _WAITS and status["controller"] == "alive":
        yield f"{what_it_does(status)}{_since(status)}"


def _tables(status: Mapping[str, Any]) -> Iterator[str]:
    workers = (*status["workers"], *status["standbys"])
    for columns, rows in ((_WORKER, workers), (_NODE, status["nodes"])):
        if rows:
            yield from ("", *_lines(columns, rows))


def _lines(columns: _Columns, rows: Iterable[Any]) -> Iterator[str]:
    return _table((tuple(columns), *([text(row) for text in columns.values()] for row in rows)))


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield aligned lines. They are never cut: half a process id would name another process."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _headline(status: Mapping[str, Any]) -> str:
    progress = "".join(f", {each}" for each in _progress(status))
    layout = f" on {status['layout']}" if status["layout"] else ""
    is_down = status["controller"] == "down"
    down = "; the controller is down: last known state" if is_down else ""
    step = f"step {status['step']} of {status['goal']}"
    return f"{status['phase']}: attempt {status['attempt']}{layout}, {step}{progress}{down}"


def _details(status: Mapping[str, Any], *, verbose: bool) -> Iterator[str]:
    """Yield a line for each fact beside the tables."""
    for label, path, lines_of in _DETAILS if verbose else _DETAILS[:-1]:
        found: Any = status
        for name in filter(None, path.split(".")):
            found = found[name]
        for one in found if isinstance(found, list) else [found]:
            text = lines_of(one) or ""
            lines = [text] if isinstance(text, str) else text
            yield from (f"{label}{line}" for line in lines if line)


def _suspected(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the evidence of current suspicions, by kind and culprit."""
    shown = suspects_shown(status.get("suspects", ()), status.get("busy", ""))
    return {f"{one['kind']} {one['guilty']}": one["evidence"] for one in shown}


def _evidence(status: Mapping[str, Any]) -> str:
    where = f"{status['directory']}/{status['evidence']}"
    return f"{where} (everstep diagnose reads it)" if status["evidence"] else ""


def _shared(shared: Mapping[str, Any] | None) -> str:
    if shared is None:
        return ""
    runs = ", ".join(shared["runs"])
    return f"at most {counted(shared['limit'], 'worker')}: other runs need the rest ({runs})"


def _incident_line(one: Mapping[str, Any]) -> str:
    ago = "" if one["found_s"] is None else f", {_duration(round(one['found_s']))} ago"
    back = "" if one["recovery_s"] is None else f"; back in {one['recovery_s']:.1f} s"
    lost = f", {counted(one['lost_steps'], 'step')} lost" if back else ""
    who = f" ({one['who']})" if one["who"].isascii() else ""
    return f"incident {one['number']}{ago}: {one['kind']}{who}: {one['evidence']}{back}{lost}"


def _capacity(row: Mapping[str, Any]) -> str:
    refused = f", refused {row['refused']}: {row['why']}" if row["refused"] else ""
    since_s = row["refused_for_s"] or row["waits_s"]
    since = f", for {since_s:.0f} s" if since_s else ""
    numbers = f"asked {row['asked']}, granted {row['granted']}"
    return f"capacity {row['alternative']}: {numbers}{refused}{since}"


def _cost(cost: Mapping[str, Any]) -> str:
    if cost["usd"] is None:
        return ""
    tokens = cost["usd_per_million_tokens"]
    rate = f", ${cost['usd_per_hour']:.2f} an hour" if cost["usd_per_hour"] else ""
    per_token = "" if tokens is None else f", ${tokens:.4g} per million tokens"
    return f"${cost['usd']:.2f}{rate}{per_token}"


def _notices(status: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return a line about each machine that will be taken, by machine and notice."""
    taken: list[tuple[str, str, int | None]] = [
        (f"node {node['node'][:_NODE_CHARS]}", node["notice"], node["taken_in_s"])
        for node in status["nodes"]
        # The journal of a controller that is down does not record the source.
        if node["state"] == "draining" and "notice" in node
    ]
    if status.get("controller_notice"):
        taken.append(("the controller's machine", status["controller_notice"], None))
    return {
        (machine, notice): (
            f"{machine} goes{'' if left_s is None else f' in {max(0, left_s)} s'} ({notice})"
        )
        for machine, notice, left_s in taken
    }


def _cadence(cadence: Mapping[str, Any]) -> str:
    planned, taken = cadence["snapshot_steps"], cadence["snapshot_taken_steps"]
    parts = []
    if planned:
        is_slow = taken is not None and taken > planned
        late = f" (in fact {_every(taken)}: the copies take longer)" if is_slow else ""
        parts.append(f"a snapshot {_every(planned)}{late}")
    if cadence["checkpoint_steps"]:
        parts.append(f"a checkpoint {_every(cadence['checkpoint_steps'])}")
    text, share = ", ".join(parts) or "nothing regularly", cadence["cost_share"]
    if share is None:
        return text
    return f"{text}; {share:.2%} of step time, at most {cadence['cost_share_max']:.0%}"


def _every(steps: int) -> str:
    return "each step" if steps == 1 else f"every {steps} steps"


def _known(number: int | None) -> str:
    return "-" if number is None else str(number)


#: The lines of a status beside its tables: a label, a path into the status, and a function that
#: turns the value there into one text or several. For a list it is called with each item. An empty
#: text, or another false value, makes no line.
_DETAILS: Final[tuple[tuple[str, str, Callable[[Any], Any]], ...]] = (
    ("", "", lambda status: map(_incident_line, reversed(status["incidents"]))),
    ("", "capacity", _capacity),
    ("cost: ", "cost", _cost),
    (
        "in memory: ",
        "redundancy",
        lambda r: r["step"] and f"step {r['step']}, {what_survives(r)[0]}",
    ),
    ("notice: ", "", lambda status: _notices(status).values()),
    ("in storage: ", "redundancy.stored_step", lambda n: f"step {n}" if n else "nothing yet"),
    ("redundancy: ", "redundancy.reason", str),
    ("saves: ", "cadence", _cadence),
    ("intervals: ", "cadence.reason", str),
    ("loaded: ", "loaded", _sources_text),
    ("skipped: ", "passed_over", str),
    ("problem: ", "redundancy.problems", str),
    ("problem: ", "cadence.problems", str),
    ("evidence: ", "", _evidence),
    ("", "shared", _shared),
    ("suspected: ", "", lambda status: _suspected(status).values()),
    # Unless an incident reports it.
    ("last change: ", "", lambda s: not s["incidents"] and s["cause"] and _cause_line(s["cause"])),
    ("waits for: ", "", lambda s: "" if s["controller"] == "alive" else str(s["waits_for"])),
    ("ended: ", "reason", str),
    ("bounds of waits: ", "bounds_s", _bounds_text),  # the last one: shown only with --verbose
)
_WORKER: Final[_Columns] = {
    "rank": lambda row: str(row.get("rank", "standby")),
    "worker": lambda row: row["worker"],
    "node": lambda row: row["node"][:_NODE_CHARS],
    "pid": lambda row: _known(row["pid"]),
    "state": lambda row: row["state"],
    "at": lambda row: (
        "-" if "rank" not in row or row["step"] is None else f"step {row['step']}, {row['phase']}"
    ),
    "heartbeat": lambda row: (
        "-" if (age_s := row["last_heartbeat_s"]) is None else f"{age_s:.1f} s ago"
    ),
}
_NODE: Final[_Columns] = {
    "node": lambda row: row["node"][:_NODE_CHARS],
    "state": lambda row: row["state"],
    "raylet pid": lambda row: _known(row["raylet_pid"]),
    "keeper pid": lambda row: _known(row["keeper_pid"]),
    "reservations": lambda row: " ".join(map(str, row["reservations"])) or "-",
}
_RUN: Final[_Columns] = {
    "directory": lambda run: run["directory"] or "-",
    "phase": lambda run: run["phase"],
    "step": lambda run: _known(run["step"]),
    "workers": lambda run: (
        _known(run["workers"]) + (f" + {run['standbys']} standby" if run["standbys"] else "")
    ),
    "since": lambda run: (
        "-" if run["since"] is None else f"{datetime.fromtimestamp(run['since']):%b %d %H:%M}"  # noqa: DTZ006 - for people, in their time zone
    ),
    "cluster": lambda run: run["address"],
    "note": lambda run: run["note"],
}
_NODE_PLAN: Final[_Columns] = {
    "lost node": lambda plan: plan.lost_nodes[0][:_NODE_CHARS],
    "resumes after": lambda plan: f"step {plan.step}" if plan.step else "from step 0",
    "steps redone": lambda plan: str(plan.lost_steps),
    "loads": lambda plan: _sources_text(plan.bytes_by_source) or "-",
    "workers": lambda plan: (
        f"{plan.workers_before} -> {plan.workers_after or 'waits for capacity'}"
    ),
}
