"""A real Ray cluster on a network of its own: every node is a machine made of Linux namespaces.

A machine has its own network, processes, host name, shared memory and ``/etc/hosts``; only files
are shared. A switch, itself a network namespace, connects them, and faults are made in it, so that
no program is notified: packets go missing, no connection is closed and no link goes down.

Nothing outlives the process that made it, however that ends: the kernel ends the machines with it,
and their network goes with its last process. Needs root, and ``ip`` and ``tc`` of iproute2.
"""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

#: The machine with the controller and without workers; nodes count from 1.
HEAD = 0
#: The machine with the Redis that keeps what the head knows, where there is one.
REDIS = 31
_PORT, _REDIS_PORT, _JOBS_PORT = 6379, 6380, 8265
_MACHINES_MAX = 32
#: This process, where it reaches the machines of a cluster, has the address of the last one.
OUTSIDE = 253
_START_S_MAX = 120.0
_LOOK_S = 0.05
_BIN = Path(sys.executable).parent
_PREFIX = "everstep-network-"
#: Ends a process with the one that started it, also if that one is killed.
_TIED = ("setpriv", "--pdeathsig", "KILL")
#: Takes whatever is redirected to it: its other end drops everything.
_VOID = "void"
#: Preferences of the filters of the switch, so that each can be taken back alone.
_ALL, _PAIR = 10, 100
_NODE_ID = b"--node_id="
_ANYTHING = ("all", "u32", "match", "u32", "0", "0")
_NAMESPACES = (
    "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
)  # fmt: skip
#: A machine waits for its cable; then Ray runs on it, and runs again as systemd or Kubernetes would
#: have it. The first process of a machine reaps the orphans of the others.
_BOOT = """
mount -t tmpfs -o size=2g tmpfs /dev/shm && mount --bind "$1" /etc/hosts &&
mount --bind "$2" /etc/nsswitch.conf && hostname "$3" && echo up && read _ &&
ip link set lo up && ip addr add "$4"/24 dev eth0 && ip link set eth0 up &&
ip route add default dev eth0 || exit 1
shift 4
trap 'exit 0' TERM
while true; do "$@" & wait $!; sleep 1; done
"""
#: The file of a machine's clock: a step in whole seconds, seen by every process at once.
_CLOCK = "everstep-clock"
_CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long none, *step = &none;
static int (*get)(clockid_t, struct timespec *);

__attribute__((constructor)) static void open_step(void) {
    char path[4096];
    get = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    if (!getenv("TMPDIR")) return;
    snprintf(path, sizeof path, "%s/everstep-clock", getenv("TMPDIR"));
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, 8)) return;
    void *found = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) step = found;
    close(file);
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    if (!get) get = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = get(clock, at);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += *step;
    return result;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


@functools.cache
def why_not() -> str:
    """Return why no such cluster can be made here; "" if it can."""
    if os.geteuid():
        return "needs root for network namespaces"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter", *_TIED[:1]) if not _has(tool)]
    if missing:
        return f"needs {', '.join(missing)}"
    try:
        with contextlib.closing(Switch()) as switch:
            switch.add("probe")
            switch.lose("probe", _ALL, "ingress")
    except (subprocess.SubprocessError, OSError, EOFError) as error:
        return f"this kernel makes no network that loses packets: {_reason(error)}"
    return ""


@functools.cache
def why_no_redis() -> str:
    """Return why such a cluster can have no Redis; "" if it can."""
    return why_not() or ("" if _has("redis-server") else "needs redis-server")


def _has(tool: str) -> bool:
    return shutil.which(tool) is not None


def _reason(error: Exception) -> str:
    words = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return " ".join(str(words).split())


def _call(*words: str) -> str:
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def _spawn(namespaces: Sequence[str], words: Sequence[str], **options: object) -> subprocess.Popen:  # type: ignore[type-arg]
    """Start a process in new namespaces that is killed with this one."""
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [*_TIED, "unshare", *namespaces, *words], start_new_session=True, **options
    )


class Switch:
    """A network namespace with a bridge; each cable to it has its filters here."""

    def __init__(self) -> None:
        self._process = _spawn(
            ["--net"], ["sh", "-c", "echo up; exec sleep infinity"], stdout=subprocess.PIPE
        )
        try:
            assert self._process.stdout is not None
            self._process.stdout.readline()
            self._ip("link", "add", "bridge", "type", "bridge")
            self._ip("link", "set", "bridge", "up")
            self._ip("link", "add", _VOID, "type", "veth", "peer", "name", "nowhere")
            self._ip("link", "set", _VOID, "up")
            self._ip("link", "set", "nowhere", "up")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the namespace with all that is in it."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ip(self, *words: str) -> None:
        self._inside("ip", *words)

    def _inside(self, *words: str) -> str:
        return _call("nsenter", "-t", str(self._process.pid), "-n", *words)

    def add(self, port: str, process: int | None = None, *, device: str = "eth0") -> None:
        """Plug in a cable; its other end becomes ``device`` of a process, in its network."""
        there = ["name", device, "netns", str(process)] if process else ["name", f"{port}-end"]
        self._ip("link", "add", port, "type", "veth", "peer", *there)
        self._ip("link", "set", port, "master", "bridge", "up")
        self._inside("tc", "qdisc", "add", "dev", port, "clsact")

    def remove(self, port: str) -> None:
        """Unplug a cable; nothing happens if its machine took it along."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self._ip("link", "del", port)

    def lose(self, port: str, number: int, way: str, *, to: str = "") -> None:
        """Lose what goes through a port, all or what is for the address ``to``.

        ``way`` is "ingress" for what its machine sends, "egress" for what it would receive.
        """
        match = ("ip", "u32", "match", "ip", "dst", to) if to else _ANYTHING
        # Some kernels lack the action "drop", and hardly one lacks "mirred".
        self._inside(
            "tc", "filter", "replace", "dev", port, way, "pref", str(number), "protocol", *match,
            "action", "mirred", "egress", "redirect", "dev", _VOID,
        )  # fmt: skip

    def pass_on(self, port: str, number: int, way: str) -> None:
        """Lose them no longer."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self._inside("tc", "filter", "del", "dev", port, way, "pref", str(number))

    def limit(self, port: str, rate: str) -> None:
        """Let no more than ``rate``, such as "50mbit", through to a machine; "" for no limit."""
        how = ("tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
        if rate:
            self._inside("tc", "qdisc", "replace", "dev", port, "root", *how)
        else:
            self._unlimit(port)

    def limit_from(self, port: str, source: str, rate: str, others: str) -> None:
        """Let ``rate`` through to a machine of what ``source`` sends, ``others`` of the rest."""
        self._unlimit(port)
        self._inside(
            "tc", "qdisc", "add", "dev", port, "root", "handle", "1:", "htb", "default", "1"
        )
        for number, each in (("1:1", others), ("1:2", rate)):
            self._inside(
                "tc", "class", "add", "dev", port, "parent", "1:", "classid", number, "htb",
                "rate", each,
            )  # fmt: skip
        self._inside(
            "tc", "filter", "add", "dev", port, "parent", "1:", "protocol", "ip", "u32",
            "match", "ip", "src", source, "flowid", "1:2",
        )  # fmt: skip

    def _unlimit(self, port: str) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._inside("tc", "qdisc", "del", "dev", port, "root")


@dataclass
class _Machine:
    process: subprocess.Popen[bytes]
    init_pid: int
    log: Path  # in its folder for temporary files


class NetworkCluster:
    """A head without workers and nodes, each a machine; Ray has the settings that it comes with.

    Args:
        num_nodes: Beside the head.
        cpus_per_node: Workers that fit on each.
        number: Number of the cluster, from 0, to distinguish several: its network is
            10.213.NUMBER.0/24.
        has_dashboard: Whether the head takes jobs, on ``jobs``.
        has_redis: Whether the head may come back: what it knows is kept in a Redis on a machine of
            its own.
        has_clocks: Whether each machine has a clock of its own, for ``step_clock``; needs ``gcc``.
        head_yields: Whether the head's processes only get the processor time that all others leave,
            as if the head had processors of its own.
        environment: Variables of Ray's processes and of all commands.
    """

    def __init__(
        self,
        num_nodes: int,
        *,
        cpus_per_node: int = 1,
        number: int = 0,
        has_dashboard: bool = False,
        has_redis: bool = False,
        has_clocks: bool = False,
        head_yields: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        _forget_dead()
        self._number = number
        self._cpus = cpus_per_node
        self._has_dashboard = has_dashboard
        self._has_redis = has_redis
        self._head_yields = head_yields
        self._variables = dict(environment or {})
        # Short: Ray makes sockets below it.
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        if has_clocks:
            self._variables["LD_PRELOAD"] = str(_clock_library(self._folder))
        self._machines: dict[int, _Machine] = {}
        self._boots = itertools.count()
        self._nodes: dict[str, int] = {}
        self._commands: list[subprocess.Popen[bytes]] = []
        self._switch = Switch()
        try:
            (self._folder / "nsswitch.conf").write_text("hosts: files\n")
            if has_redis:
                self._boot_redis()
            for machine in range(num_nodes + 1):
                self.boot(machine)
            for machine in range(num_nodes + 1):
                self.await_ray(machine)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return the cluster."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all of it."""
        self.close()

    def close(self) -> None:
        """End all machines and the switch; delete what they wrote beside runs."""
        for machine in self.machines():
            self.kill(machine)
        for command in self._commands:
            command.kill()
            command.wait()
        self._switch.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def machines(self) -> tuple[int, ...]:
        """Return the machines that are on."""
        return tuple(sorted(self._machines))

    @property
    def address(self) -> str:
        """Return what ``everstep run --address`` takes."""
        return f"{self.host(HEAD)}:{_PORT}"

    @property
    def jobs(self) -> str:
        """Return what ``ray job submit --address`` takes."""
        return f"http://{self.host(HEAD)}:{_JOBS_PORT}"

    def host(self, machine: int) -> str:
        """Return the IP address of a machine, the same after it was booted again."""
        return host_of(machine, self._number)

    def nodes(self) -> dict[str, int]:
        """Return the machine of every node that Ray has or had, by Ray's id of the node."""
        spaces = {_space(each.init_pid): number for number, each in self._machines.items()}
        for pid in _processes():
            words = _command(pid)
            if words and words[0].endswith(b"/raylet") and _space(pid) in spaces:
                found = next((word for word in words if word.startswith(_NODE_ID)), _NODE_ID)
                self._nodes[found[len(_NODE_ID) :].decode()] = spaces[_space(pid)]
        return dict(self._nodes)

    def boot(self, machine: int, command: Sequence[str] = ()) -> None:
        """Turn a machine on, a new one or one that was off: its memory is empty.

        Ray runs on it, or ``command`` instead.
        """
        folder = self._folder / f"{next(self._boots)}"
        folder.mkdir()
        command = command or self._ray(machine, folder)
        names = [str(self._hosts(machine)), str(self._folder / "nsswitch.conf")]
        script = [*names, f"node{machine}", self.host(machine), *command]
        log = folder / "ray.log"
        with log.open("wb") as output:
            process = _spawn(
                _NAMESPACES, ["bash", "-c", _BOOT, "boot", *script],
                stdin=subprocess.PIPE, stdout=output, stderr=output, env=self._environment(folder),
            )  # fmt: skip
        _await_text(log, "up\n", process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self._machines[machine] = _Machine(process, int(children[0]), log)
        self._switch.remove(_port(machine))
        self._switch.add(_port(machine), process.pid)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()

    def await_ray(self, machine: int) -> None:
        """Wait until Ray runs on a machine that was booted."""
        booted = self._machines[machine]
        _await_text(booted.log, "Ray runtime started", booted.process)

    def _boot_redis(self) -> None:
        words = ["redis-server", "--bind", self.host(REDIS), "--port", str(_REDIS_PORT)]
        self.boot(REDIS, [*words, "--protected-mode", "no", "--save", ""])
        _await_text(self._machines[REDIS].log, "Ready to accept", self._machines[REDIS].process)

    def _ray(self, machine: int, folder: Path) -> list[str]:
        own = [
            "--head", f"--port={_PORT}", f"--include-dashboard={self._has_dashboard}",
            f"--dashboard-host={self.host(HEAD)}", f"--dashboard-port={_JOBS_PORT}",
        ]  # fmt: skip
        kept = f"RAY_REDIS_ADDRESS={self.host(REDIS)}:{_REDIS_PORT}"
        return [
            *(["chrt", "--idle", "0"] if machine == HEAD and self._head_yields else []),
            *(["env", kept] if machine == HEAD and self._has_redis else []),
            str(_BIN / "ray"), "start", "--block", f"--node-ip-address={self.host(machine)}",
            f"--temp-dir={folder}", "--num-gpus=0", "--object-store-memory=100000000",
            f"--num-cpus={self._cpus if machine != HEAD else 0}", "--disable-usage-stats",
            *(own if machine == HEAD else [f"--address={self.address}"]),
        ]  # fmt: skip

    def plug_in_host(self) -> None:
        """Let this process reach the machines; no other process learns of it."""
        device = f"everstep{self._number}"
        self._switch.add("host", os.getpid(), device=device)
        _call("ip", "addr", "add", f"{host_of(OUTSIDE, self._number)}/24", "dev", device)
        _call("ip", "link", "set", device, "up")

    def kill(self, machine: int) -> None:
        """End all processes of a machine at once; their connections are closed by its kernel."""
        off = self._machines.pop(machine)
        with contextlib.suppress(ProcessLookupError):
            os.kill(off.init_pid, signal.SIGKILL)
        off.process.kill()
        off.process.wait()
        self._switch.remove(_port(machine))

    def power_off(self, machine: int) -> None:
        """End all processes of a machine at once, and let no packet tell of it."""
        self.partition(machine)
        self.kill(machine)

    def freeze(self, machine: int) -> None:
        """Stop all processes of a machine by a signal."""
        _signal(self.pids(machine), signal.SIGSTOP)

    def thaw(self, machine: int) -> None:
        """Let them go on."""
        _signal(self.pids(machine), signal.SIGCONT)

    def partition(self, machine: int) -> None:
        """Lose all that a machine sends, and all that is sent to it."""
        self.deafen(machine)
        self.silence(machine)

    def deafen(self, machine: int) -> None:
        """Lose all that is sent to a machine: it can speak and cannot hear."""
        self._switch.lose(_port(machine), _ALL, "egress")

    def silence(self, machine: int) -> None:
        """Lose all that a machine sends: it can hear and cannot speak."""
        self._switch.lose(_port(machine), _ALL, "ingress")

    def heal(self, machine: int) -> None:
        """Lose nothing more of a machine."""
        for way in ("ingress", "egress"):
            self._switch.pass_on(_port(machine), _ALL, way)

    def cut(self, one: int, other: int) -> None:
        """Lose what two machines send each other; all others reach both."""
        for here, there in ((one, other), (other, one)):
            self._switch.lose(_port(here), _PAIR + there, "ingress", to=f"{self.host(there)}/32")

    def mend(self, one: int, other: int) -> None:
        """Undo ``cut``."""
        for here, there in ((one, other), (other, one)):
            self._switch.pass_on(_port(here), _PAIR + there, "ingress")

    def limit(self, machine: int, rate: str) -> None:
        """Let no more than ``rate``, such as "50mbit", through to a machine; "" for no limit."""
        self._switch.limit(_port(machine), rate)

    def slow_link(self, source: int, target: int, rate: str) -> None:
        """Let no more than ``rate`` through from one machine to another."""
        self._switch.limit_from(_port(target), self.host(source), rate, "1gbit")

    def step_clock(self, machine: int, seconds: float) -> None:
        """Set the time of day of a machine so much before or behind that of all others."""
        # In place: processes have it mapped.
        with (self._machines[machine].log.parent / _CLOCK).open("r+b") as file:
            file.write(struct.pack("=q", round(seconds)))

    def inside(self, machine: int, path: str) -> Path:
        """Return where this process finds a file of a machine."""
        return Path(f"/proc/{self._machines[machine].init_pid}/root") / path.lstrip("/")

    def pids(self, machine: int) -> list[int]:
        """Return the processes of a machine, as this process numbers them; none if it is off."""
        off = machine not in self._machines
        space = 0 if off else _space(self._machines[machine].init_pid)
        return [pid for pid in _processes() if space and _space(pid) == space]

    def ray_logs(self) -> list[Path]:
        """Return what all Rays wrote of themselves, those of machines that are off included."""
        found = self._folder.glob("*/session_2*/logs/*")
        names = ("gcs_server", "raylet", "debug_", "worker-")
        return [path for path in found if path.name.startswith(names)]

    def pid(self, machine: int, number: int) -> int | None:
        """Return the process that a machine itself numbers ``number``; None if it is away."""
        for pid in self.pids(machine):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/status").read_text()
                if int(text.partition("NSpid:")[2].partition("\n")[0].split()[-1]) == number:
                    return pid
        return None

    def start(self, machine: int, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on a machine; what it prints goes to ``log``."""
        with log.open("ab") as output:
            command = subprocess.Popen(
                self._on(machine, words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(self._machines[machine].log.parent),
                start_new_session=True,
            )
        self._commands.append(command)
        return command

    def run(self, machine: int, words: Sequence[str], timeout_s: float = 60.0) -> str:
        """Return what a command on a machine prints."""
        done = subprocess.run(
            self._on(machine, words), check=True, capture_output=True, text=True, timeout=timeout_s,
            env=self._environment(self._machines[machine].log.parent),
        )  # fmt: skip
        return done.stdout

    def _on(self, machine: int, words: Sequence[str]) -> list[str]:
        inside = ["nsenter", "-t", str(self._machines[machine].init_pid)]
        return [*_TIED, *inside, "-n", "-p", "-m", "-u", "-i", *words]

    def _environment(self, folder: Path) -> dict[str, str]:
        own = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        path = f"{_BIN}{os.pathsep}{os.environ['PATH']}"
        return {
            **own, **self._variables, "PATH": path,
            "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
            # In /tmp it would find clusters of others, whose processes it cannot see.
            "RAY_ADDRESS": self.address, "TMPDIR": str(folder),
        }  # fmt: skip

    def _hosts(self, machine: int) -> Path:
        """Return a file of names by which a machine knows all others, and itself as Debian has it.

        It asks no server: without an answer it would wait 10 s.
        """
        hosts = {each: self.host(each) for each in range(_MACHINES_MAX)} | {machine: "127.0.1.1"}
        lines = [f"{address} node{each}" for each, address in hosts.items()]
        path = self._folder / f"hosts{machine}"
        path.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        return path


def host_of(machine: int, number: int = 0) -> str:
    """Return the IP address of a machine of the cluster ``number``."""
    return f"10.213.{number}.{machine + 1}"


def _port(machine: int) -> str:
    return f"m{machine}"


def _await_text(log: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until ``process`` has written ``text`` to ``log``."""
    deadline_s = time.monotonic() + _START_S_MAX
    while text not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise OSError(f"a machine did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(_LOOK_S)


def _clock_library(folder: Path) -> Path:
    """Return a library that adds what a file in ``TMPDIR`` says to each time of day."""
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_CLOCK_SOURCE)
    _call("gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl")
    return library


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _space(pid: int) -> int:
    """Return the number of the space in which a process is numbered, 0 if it has just ended."""
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return 0


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _forget_dead() -> None:
    """Delete the folders of clusters whose makers were killed; all else ended with them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        maker = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if maker.isdecimal() and not Path(f"/proc/{maker}").exists():
            shutil.rmtree(folder, ignore_errors=True)
