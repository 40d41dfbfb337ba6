"""The snapshot memory of a node in a process of its own, without Ray: to be asked, and killed."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.forking import forking
from tests.support.made import room_for
from ucp_core.native import Checkpoint, load
from workers.keeper import MemorySources
from workers.keeper.node_memory import NodeMemory
from workers.protocol import Inventory, KeeperOrder, PartRef, Peer
from workers.settings import Settings

#: It is a new process, which imports torch first, perhaps on a busy machine.
_ANSWER_S_MAX = 240.0


class NodeProcess:
    """A node's memory: everything that its keeper has beside the watch.

    Attributes:
        secret: The secret that it requires of peers and loaders; a new one after each start.
    """

    def __init__(self, node: str, directory: Path, run: Path, settings: Settings) -> None:
        self.node, self.directory = node, directory
        self._run, self._settings = run, settings
        self.start()

    def start(self) -> None:
        """Start the process; again, if it was killed."""
        context: Any = forking()
        self._pipe, theirs = context.Pipe()
        how = {
            "node": self.node,
            "host": "127.0.0.1",
            "directory": self.directory,
            "run_url": str(self._run),
            "settings": self._settings,
        }
        self._process: BaseProcess = context.Process(
            target=self._target(), args=(theirs, how), daemon=True
        )
        self._process.start()
        theirs.close()
        (host, port), secret = self._answer()
        self._peer = Peer(node=self.node, host=host, port=port, secret=secret)

    @property
    def pid(self) -> int:
        """Return the process."""
        assert self._process.pid is not None
        return self._process.pid

    def tend(self, living: Sequence[str]) -> None:
        """Make it free unneeded memory, as its keeper does with every report."""
        self._ask("tend", set(living))

    def inventory(self) -> Inventory:
        """Return what it holds."""
        return self._ask("inventory")  # type: ignore[no-any-return]

    def order(self, order: KeeperOrder) -> None:
        """Tell it of an attempt."""
        self._ask("fence", order)
        self._ask("obey", order)

    def peer(self) -> Peer:
        """Return it as other keepers reach it."""
        return self._peer

    def places(self, *, parities: bool = False) -> list[PartRef]:
        """Return everything that it holds of ranks, or all parities, with the way there."""
        held = self.inventory()
        refs = held.parities if parities else held.parts
        return [replace(ref, peer=self._peer) for ref in refs]

    def kill(self) -> None:
        """SIGKILL it."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _target(self) -> Callable[[Connection, dict[str, Any]], None]:
        """Return what the process runs."""
        return _serve

    def _ask(self, do: str, *arguments: Any) -> Any:
        self._pipe.send((do, arguments))
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(_ANSWER_S_MAX), "the node's memory does not answer"
        return self._pipe.recv()


def newest(nodes: Sequence[NodeProcess]) -> tuple[tuple[int, int], tuple[PartRef, ...]]:
    """Return ``(step, attempt)`` of the newest version that is whole, and all places of its parts.

    ``(0, 0)`` and nothing if there is none.
    """
    found: dict[tuple[int, int], list[PartRef]] = {}
    for node in nodes:
        for place in node.places():
            found.setdefault((place.held.attempt, place.held.step), []).append(place)
    whole = [
        version
        for version, places in found.items()
        if {place.held.rank for place in places} == set(range(places[0].held.world_size))
    ]
    if not whole:
        return (0, 0), ()
    attempt, step = max(whole)
    return (step, attempt), tuple(found[attempt, step])


def serve(pipe: Connection, memory: NodeMemory, **more: Callable[..., Any]) -> None:
    """Do what is asked for through the pipe: what the memory does, and ``more`` by name."""
    pipe.send((memory.address, memory.secret))
    while True:
        try:
            do, arguments = pipe.recv()
        except EOFError:
            return
        act = more.get(do) or getattr(memory, do)
        pipe.send(act(*arguments))


def _serve(pipe: Connection, how: dict[str, Any]) -> None:
    serve(pipe, NodeMemory(**how))


def whole_state(checkpoint: Checkpoint) -> dict[Any, bytes]:
    """Return all bytes of a version, verified."""
    need = [room_for(entry) for entry in checkpoint.state_map.entries.values()]
    load(checkpoint, need)
    return {(tensor.fqn, tensor.slot): bytes(tensor.data) for tensor in need}


def read(places: tuple[PartRef, ...], node: NodeProcess) -> dict[Any, bytes]:
    """Return the state that the keepers hold, as a worker of ``node`` loads it."""
    sources = MemorySources(places, node=node.node, keeper_directory=node.directory)
    with closing(sources):
        return sources.load(whole_state)
