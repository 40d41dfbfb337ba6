"""Where a soak takes place, and how a fault is made there.

Network: a head and nodes, each a machine made of namespaces. Local: simulated nodes. Storage is an
S3 server behind a proxy that fails as it is told; this process passes it by.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import fsspec
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2

from orchestrator.driver.run import Run
from orchestrator.errors import OrchestratorError, RunNotFoundError
from orchestrator.shell import HostedCluster
from tests.benchmarks.soak_faults import KINDS
from tests.benchmarks.soak_ledger import ALL
from tests.support import train_paced
from tests.support.network_cluster import HEAD, OUTSIDE, REDIS, NetworkCluster, host_of
from tests.support.object_servers import Fault, Proxy, proxied, s3_server
from ucp_core.errors import UcpError

NUM_NODES: Final = 4
#: The least with which a run goes on, and with which a fault counts as survived.
WORKERS_MIN: Final = 2
ENDLESS, PACE_S = 1_000_000, 0.2
#: Ray notices some losses after a minute, and a machine that it gave up comes back after that.
ACT_S_MAX = 300.0
_BEGIN_AGAIN_S, _LOOK_S = 5.0, 0.25
#: Nodes that live briefly are noted so often: looks at all processes take 0.1 s.
_NOTE_S = 2.0
#: A Ray that ended by itself starts again within seconds.
_WITHOUT_RAY_S_MAX = 30.0
#: A second fault is made so late at most.
_STRIKE_S_MAX = 10.0
#: The step that is not a number comes so much later.
_NAN_STEPS = 25
#: A node is taken so long after it was said.
_NOTICE_S = 12
#: Ray's own timers stop for as long as a clock was set back: with an hour a machine would take no
#: new work for an hour.
_CLOCK_S = 60
_PORT = 5000
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  a file system, and of a machine of its own
_NOTICE = f"{_SHARED_MEMORY}/everstep-notice"
_METHODS = ("GET", "PUT", "POST", "HEAD", "DELETE")
_STORAGE: Final[dict[str, tuple[Fault, ...]]] = {
    "storage-slow": tuple(Fault(method=m, times=1 << 30, delay_s=1.0) for m in _METHODS),
    "storage-silent": tuple(Fault(method=m, times=1 << 30, delay_s=15.0) for m in _METHODS),
    "storage-away": tuple(Fault(method=m, times=1 << 30) for m in _METHODS),
    "storage-full": tuple(
        Fault(method=m, times=1 << 30, status=507, code="XMinioStorageFull")
        for m in ("PUT", "POST")
    ),
    "storage-busy": tuple(
        Fault(method=m, times=1 << 30, share=0.5, status=503) for m in _METHODS
    ),
}  # fmt: skip

T = TypeVar("T")
Undo = Callable[[], None]


def _nothing() -> None:
    pass


class Ended(Exception):  # noqa: N818  no error of ours
    """The run has ended, though no one stopped it."""


class Away(Exception):  # noqa: N818  no error of ours
    """The target of a fault is not there."""


class Network:
    """Machines of namespaces; the head has the number ``HEAD``."""

    #: A machine whose Ray ended starts it again.
    revives = True

    def __init__(self, environment: Mapping[str, str], *, has_redis: bool) -> None:
        self.has_redis = has_redis
        self.cluster = NetworkCluster(
            NUM_NODES, has_clocks=True, has_redis=has_redis, environment=environment
        )
        self.cluster.plug_in_host()
        self.address = self.cluster.address
        self.nodes = self.cluster.nodes
        self._without_ray_s: dict[int, float] = {}

    def tend(self) -> None:
        """Boot the machines again on which Ray does not serve for long, as probes would.

        ``ray start --block`` does not end when its raylet obeys SIGTERM, nor do some raylets whose
        head forgot them. A GCS that gets SIGTERM closes its port and hangs, so a look at its
        process finds nothing wrong; after a minute the raylets of all nodes end themselves.
        """
        now_s = time.monotonic()
        for machine in set(self.cluster.machines()) - {REDIS}:
            if self.named(machine, "raylet") and (machine != HEAD or self.head_answers()):
                self._without_ray_s.pop(machine, None)
            elif now_s - self._without_ray_s.setdefault(machine, now_s) > _WITHOUT_RAY_S_MAX:
                del self._without_ray_s[machine]
                with contextlib.suppress(OSError):  # Ray did not start in time: another look
                    self.replace(machine)

    def head_answers(self) -> bool:
        """Return whether the GCS takes connections; the kernel takes them for a stopped one."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.cluster.close()

    def start(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        return self.cluster.start(HEAD, words, log)

    def pid(self, machine: int, number: int) -> int | None:
        return self.cluster.pid(machine, number)

    def pids(self) -> list[int]:
        return [pid for machine in self.cluster.machines() for pid in self.cluster.pids(machine)]

    def named(self, machine: int, name: str) -> int | None:
        """Return the process of Ray with this name; None if it is away."""
        return next((pid for pid in self.cluster.pids(machine) if _runs(pid, name)), None)

    def replace(self, machine: int) -> None:
        """End all processes of a machine and boot it again."""
        self.cluster.kill(machine)
        self.cluster.boot(machine)
        if machine == HEAD:
            self.cluster.await_ray(HEAD)

    def ray_logs(self) -> list[Path]:
        return self.cluster.ray_logs()

    def folder_bytes(self) -> int:
        total = 0
        for machine in self.cluster.machines():
            with contextlib.suppress(OSError):  # its first process has ended
                used = os.statvfs(self.cluster.inside(machine, _SHARED_MEMORY))
                total += used.f_bsize * (used.f_blocks - used.f_bfree)
        return total


class Local:
    """Simulated nodes, numbered from 1 as they came."""

    revives = False
    has_redis = False

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**os.environ, **environment}
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            self.cluster = HostedCluster(num_nodes=NUM_NODES, cpus_per_node=1)
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.address = self.cluster.address
        self._numbers: dict[str, int] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self.nodes()

    def tend(self) -> None:
        pass

    def close(self) -> None:
        for command in self._started:
            command.kill()
            command.wait()
        self.cluster.shutdown()

    def nodes(self) -> dict[str, int]:
        for node in self.cluster.nodes():
            self._numbers.setdefault(node, len(self._numbers) + 1)
        return self._numbers

    def start(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        program = [str(Path(sys.executable).parent / words[0]), *words[1:]]
        with log.open("ab") as output:
            self._started.append(
                subprocess.Popen(
                    program,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._environment,
                )
            )
        return self._started[-1]

    def pid(self, _: int, number: int) -> int | None:
        return number if _words(number) else None

    def pids(self) -> list[int]:
        nodes = [node.encode() for node in self.cluster.nodes()]
        return [pid for pid in _all_pids() if any(node in _words(pid) for node in nodes)]

    def _node(self, machine: int) -> str:
        return next(node for node, number in self._numbers.items() if number == machine)

    def named(self, machine: int, name: str) -> int | None:
        node = self._node(machine).encode()
        found = (pid for pid in _all_pids() if _runs(pid, name) and node in _words(pid))
        return next(found, None)

    def replace(self, machine: int) -> None:
        self.cluster.kill_node(self._node(machine))
        self.cluster.add_node()

    def ray_logs(self) -> list[Path]:
        return []

    def folder_bytes(self) -> int:
        return 0


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _runs(pid: int, name: str) -> bool:
    return _words(pid).split(b"\0")[0].endswith(f"/{name}".encode())


@dataclass
class Operator:
    """Keeps a run going as an operator's tools would, and sees what it tells of itself."""

    site: Any
    proxy: Proxy
    url: str
    folder: Path
    orders: Path
    files: Run = field(init=False)
    _steps: int = ENDLESS
    _pace_s: float = PACE_S
    _command: subprocess.Popen[bytes] | None = None
    _begun_s: float = 0.0
    _noted_s: float = 0.0

    def __post_init__(self) -> None:
        self.files = Run(self.url)
        self.log = self.folder / "run.log"

    def begin(self, steps: int = ENDLESS, pace_s: float = PACE_S) -> None:
        """Begin the run, or begin it again."""
        self._steps, self._pace_s, self._begun_s = steps, pace_s, time.monotonic()
        self._command = self.site.start([
            "everstep", "run", "local/small", "--address", self.site.address,
            f"run.directory={self.url}", f"run.script={train_paced.__file__}",
            f"run.arguments=['{pace_s}', '0', '{self.orders}']", f"train.steps={steps}",
            "train.schedule=constant", f"workers.min={WORKERS_MIN}",
            f"workers.max={NUM_NODES}", "workers.standby_per_node=0",
            f"notices.file={_NOTICE}", "notices.cloud=none",
            # A soak has in an hour what a run has in a year.
            "recovery.infrastructure_failures_max=1000000", "recovery.user_errors_max=1000000",
            "recovery.preemptions_max=1000000",
        ], self.log)  # fmt: skip

    def tend(self) -> None:
        """Begin the run again if its command ended and the run did not."""
        ended = self._command is not None and self._command.poll() is not None
        if ended and time.monotonic() > self._begun_s + _BEGIN_AGAIN_S and not self.summary():
            self.begin(self._steps, self._pace_s)

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of the run, None before it is over."""
        try:
            return self.files.summary()
        except (UcpError, ValueError):
            return None

    def look(self) -> dict[str, Any] | None:
        """Return the run's status; None while it tells none."""
        if time.monotonic() > self._noted_s + _NOTE_S:
            self.site.nodes()
            self.site.tend()
            self._noted_s = time.monotonic()
        with contextlib.suppress(RunNotFoundError, OrchestratorError, UcpError):
            return self.files.ask("status")
        return None

    def controller(self) -> tuple[str, int]:
        """Return which controller leads the run: its node, and its number there."""
        with contextlib.suppress(RunNotFoundError, OrchestratorError, UcpError):
            contact = self.files.contact()
            return contact["node"], contact["pid"]
        return "", 0

    def until(
        self,
        what: str,
        condition: Callable[[dict[str, Any]], Any],
        timeout_s: float = ACT_S_MAX,
    ) -> dict[str, Any]:
        """Return the first status that meets ``condition``."""
        deadline_s = time.monotonic() + timeout_s
        status: dict[str, Any] | None = None
        while time.monotonic() < deadline_s:
            if (seen_now := self.look()) is not None:
                status = seen_now
                if condition(status):
                    return status
            if summary := self.summary():
                raise Ended(f"{summary['outcome']}: {summary['reason']}")
            self.tend()
            time.sleep(_LOOK_S)
        seen = {k: (status or {}).get(k) for k in ("phase", "attempt", "step", "workers", "cause")}
        raise TimeoutError(f"not seen within {timeout_s:.0f} s: {what}; {seen}")

    def training(self, workers: int, steps: int = 4, timeout_s: float = ACT_S_MAX) -> Any:
        """Wait until so many workers have made a few steps from now on; return the status."""
        enough = lambda s: s["phase"] == "training" and len(ranks(s)) >= workers  # noqa: E731
        begun = self.until(f"{workers} workers", enough, timeout_s)
        goal = begun["step"] + steps
        return self.until("some steps", lambda s: enough(s) and s["step"] >= goal, timeout_s)

    def ended(self, outcome: str) -> dict[str, Any]:
        """Wait until the run has ended with ``outcome``; return its summary."""
        deadline_s = time.monotonic() + ACT_S_MAX
        while time.monotonic() < deadline_s:
            if (summary := self.summary()) and summary["outcome"] == outcome:
                return summary
            if outcome != "stopped" and summary is None:
                self.tend()
            time.sleep(_LOOK_S)
        raise TimeoutError(f"the run has not {outcome}: {self.summary()}")

    def stop(self) -> dict[str, Any]:
        """Stop the run as a user does; return its summary."""
        self._command = None
        self.site.start(["everstep", "stop", self.url], self.folder / "stop.log").wait(ACT_S_MAX)
        return self.ended("stopped")


def ranks(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the workers of a status that train."""
    return [worker for worker in status["workers"] if worker["rank"] >= 0]


def keepers(status: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return node and number of each keeper of a status.

    One that is starting has no number yet, and a node that is lost keeps the number of one that
    ended with it.
    """
    return [
        (view["node"], view["keeper_pid"])
        for view in status["nodes"]
        if view["keeper_pid"] and view["state"] != "lost"
    ]


class Deed:
    """One fault at a place: what it does, what it hurts and how it is undone.

    Args:
        operator: Operator of the run.
        kind: A key of ``KINDS``.
        status: Status of the run before it.
        free: The machines that train, in an order that was drawn.
        forward: Whether a clock is set forward.
    """

    def __init__(
        self,
        operator: Operator,
        kind: str,
        status: Mapping[str, Any],
        free: Sequence[int],
        *,
        forward: bool,
    ) -> None:
        self._step_s = _CLOCK_S if forward else -_CLOCK_S
        self.kind, self.what = kind, KINDS[kind]
        self._operator, self._site, self._status = operator, operator.site, status
        self._controller = operator.controller()
        self.missed = ""  #: Why it was not made, if it was not.
        self.machine, self._other = free[0], free[-1]
        strikes = self.what.strikes
        self.hurt: Collection[int] = frozenset(
            {self.machine} if strikes == "machine" else ALL if strikes == "head" else ()
        )
        if kind == "pair":
            self.hurt = frozenset({self.machine, self._other})

    def do(self) -> Undo:
        """Do it; return what undoes it. If it could not be made, ``missed`` says why."""
        try:
            return self._done()
        except Exception as error:  # noqa: BLE001  the soak goes on, and its table tells
            self.missed = str(error) if isinstance(error, Away) else repr(error)
            return _nothing

    def _done(self) -> Undo:
        process, _, how = self.kind.partition("-")
        if how in ("kill", "stop", "term") and self.kind != "node-kill":
            return self._signal(process, signal.Signals[f"SIG{how.upper()}"])
        if self.kind in _STORAGE:
            self._operator.proxy.seen.clear()
            self._operator.proxy.faults[:] = _STORAGE[self.kind]
            return self._operator.proxy.faults.clear
        name = self.kind.replace("-", "_")
        undo: Undo = getattr(self, f"_{name}")()
        return undo

    def has_shown(self, status: Mapping[str, Any]) -> bool:
        """Return whether the run has dealt with it and trains."""
        if status["phase"] != "training" or not status["step"]:
            return False
        if self.what.shows == "keeper":
            found = self._keepers(status)
            return bool(found) and not set(found) & set(self._keepers(self._status))
        if self.what.shows == "controller":
            return self._operator.controller() not in (self._controller, ("", 0))
        if self.what.shows == "steps":
            return bool(status["step"] > self._status["step"] + _NAN_STEPS)
        return bool(status["attempt"] > self._status["attempt"])

    def _ranks(self, status: Mapping[str, Any]) -> list[dict[str, Any]]:
        nodes = self._site.nodes()
        return [each for each in ranks(status) if nodes.get(each["node"]) == self.machine]

    def _keepers(self, status: Mapping[str, Any]) -> list[int]:
        nodes = self._site.nodes()
        return [number for node, number in keepers(status) if nodes.get(node) == self.machine]

    def _pid(self, process: str, status: Mapping[str, Any]) -> int | None:
        """Return the process as this one numbers it; None if it is away."""
        if process in ("worker", "keeper"):
            here = self._keepers(status)[-1:]
            if process == "worker":
                here = [each["pid"] for each in self._ranks(status)]
            found = self._site.pid(self.machine, here[0]) if here else None
        elif process == "controller":
            found = self._site.pid(HEAD, self._operator.controller()[1])
        elif process == "head":
            found = self._site.named(HEAD, "gcs_server")
        else:
            found = self._site.named(self.machine, process)
        return None if found is None else int(found)

    def _strike(self, what: str, strike: Callable[[Mapping[str, Any]], T | None]) -> T:
        """Return what ``strike`` returns for a status, as soon as that is not None.

        A recovery may have replaced a process since, and a process may end between a look and a
        signal. A controller that is away says nothing: then the status of before counts.
        """
        deadline_s = time.monotonic() + _STRIKE_S_MAX
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                found = strike(self._operator.look() or self._status)
                if found is not None:
                    return found
            time.sleep(_LOOK_S)
        raise Away(f"no {what} on machine {self.machine} within {_STRIKE_S_MAX:g} s")

    def _rank(self) -> dict[str, Any]:
        return self._strike("rank", lambda status: next(iter(self._ranks(status)), None))

    def _signal(self, process: str, number: signal.Signals) -> Undo:
        def strike(status: Mapping[str, Any]) -> int | None:
            if (found := self._pid(process, status)) is not None:
                os.kill(found, number)
            return found

        pid = self._strike(process, strike)
        # ``ray start --block`` does not end when its raylet obeys SIGTERM.
        if process == "raylet" and (number == signal.SIGTERM or not self._site.revives):
            return partial(self._site.replace, self.machine)
        return partial(_go_on, pid) if number == signal.SIGSTOP else _nothing

    def _raise(self) -> Undo:
        (self._operator.orders / f"raise-{self._rank()['rank']}").touch()
        return partial(self._take_back, "raise-*")

    def _take_back(self, pattern: str) -> None:
        for path in self._operator.orders.glob(pattern):
            path.unlink(missing_ok=True)

    def _nan(self) -> Undo:
        # Far enough for all ranks to see it in time.
        (self._operator.orders / f"nan-{self._status['step'] + _NAN_STEPS}").touch()
        return _nothing

    def _memory(self) -> Undo:
        def strike(status: Mapping[str, Any]) -> Undo | None:
            if (pid := self._pid("worker", status)) is None:
                return None
            used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            before = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (used, before[1]))
            return partial(_unlimit, pid, before)

        return self._strike("worker", strike)

    def _shared_memory(self) -> Undo:
        path = self._site.cluster.inside(self.machine, f"{_SHARED_MEMORY}/filler")
        with path.open("wb") as file:
            free = os.statvfs(path)
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize)
        return partial(path.unlink, missing_ok=True)

    def _node_kill(self) -> Undo:
        self._site.replace(self.machine)
        return _nothing

    def _drain(self) -> Undo:
        node = self._rank()["node"]
        reason = autoscaler_pb2.DrainNodeReason.Value(  # type: ignore[attr-defined]
            "DRAIN_NODE_REASON_PREEMPTION"
        )
        end_ms = int((time.time() + _NOTICE_S) * 1000)
        GcsClient(address=self._site.address).drain_node(node, reason, "soak", end_ms)
        return partial(self._site.replace, self.machine)

    def _notice(self) -> Undo:
        self._site.cluster.inside(self.machine, _NOTICE).write_text(f"{_NOTICE_S}\n")
        return partial(self._site.replace, self.machine)

    def _clock(self) -> Undo:
        self._site.cluster.step_clock(self.machine, self._step_s)
        return partial(self._site.cluster.step_clock, self.machine, 0)

    def _clock_head(self) -> Undo:
        self._site.cluster.step_clock(HEAD, self._step_s)
        return partial(self._site.cluster.step_clock, HEAD, 0)

    def _head_off(self) -> Undo:
        self._site.replace(HEAD)
        return _nothing

    def _power_off(self) -> Undo:
        self._site.cluster.power_off(self.machine)
        return partial(self._site.cluster.boot, self.machine)

    def _partition(self) -> Undo:
        self._site.cluster.partition(self.machine)
        return partial(self._site.cluster.heal, self.machine)

    def _deaf(self) -> Undo:
        self._site.cluster.deafen(self.machine)
        return partial(self._site.cluster.heal, self.machine)

    def _mute(self) -> Undo:
        self._site.cluster.silence(self.machine)
        return partial(self._site.cluster.heal, self.machine)

    def _pair(self) -> Undo:
        self._site.cluster.cut(self.machine, self._other)
        return partial(self._site.cluster.mend, self.machine, self._other)

    def _flapping(self) -> Undo:
        for _ in range(3):
            self._site.cluster.partition(self.machine)
            time.sleep(2.0)
            self._site.cluster.heal(self.machine)
            time.sleep(3.0)
        return _nothing

    def _slow_link(self) -> Undo:
        self._site.cluster.limit(self.machine, "1mbit")
        return partial(self._site.cluster.limit, self.machine, "")


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _unlimit(pid: int, before: tuple[int, int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, before)


@contextmanager
def storage_and_site(folder: Path, *, local: bool, has_redis: bool) -> Iterator[tuple[Any, Proxy]]:
    """Start a storage server, a proxy before it and a cluster that stores there."""
    known = {
        "AWS_ACCESS_KEY_ID": "anyone",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with ExitStack() as stack:
        server = stack.enter_context(s3_server(folder / "s3.log"))
        os.environ.update({**known, "AWS_ENDPOINT_URL": server})
        # Clients are kept by their arguments: the last sitting's would look for its own server.
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        # A process that may not keep what it compiles takes half as long again to start.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        put = urllib.request.Request(f"{server}/bucket", method="PUT")  # noqa: S310  http
        urllib.request.urlopen(put, timeout=60).close()  # noqa: S310
        if local:
            proxy = stack.enter_context(proxied(server))()
            site: Any = Local({"AWS_ENDPOINT_URL": proxy.url})
            stack.callback(site.close)
        else:
            host = host_of(OUTSIDE)
            variables = {**known, "AWS_ENDPOINT_URL": f"http://{host}:{_PORT}"}
            site = Network(variables, has_redis=has_redis)
            stack.callback(site.close)
            proxy = stack.enter_context(proxied(server, host, _PORT))()
        yield site, proxy


def kept_journal(operator: Operator, to: Path) -> str:
    """Copy what a run and its Rays wrote, without checkpoints; return where to."""
    import fsspec

    files, root = fsspec.core.url_to_fs(operator.url)
    for path in files.find(root):
        name = path.removeprefix(root).lstrip("/")
        if not name.startswith("checkpoints/"):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # a run that goes on deletes files
                files.get_file(path, str(to / name))
    to.mkdir(parents=True, exist_ok=True)
    (to / "run.log").write_text(operator.log.read_text(errors="replace"))
    for path in operator.site.ray_logs():
        machine = to / "ray" / path.parts[-4]
        machine.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            shutil.copy(path, machine / path.name)
    with contextlib.suppress(OrchestratorError, UcpError):
        (to / "status.json").write_text(json.dumps(operator.files.ask("status"), indent=1))
    return str(to)
