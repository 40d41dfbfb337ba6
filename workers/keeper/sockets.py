"""Read the TCP connections of trainers from the kernel, without a trainer's help.

One request to the kernel (``NETLINK_SOCK_DIAG``) lists the connections of the machine with their
``tcp_info``. A trainer's open files show which connections are its own. So a process that is
stopped, or that holds its interpreter, is seen like any other. Both ends of a connection report the
same addresses, from which the controller finds the ranks that it joins
(``orchestrator.diagnosis.flows``). If the kernel does not answer, nothing is known.
"""

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

from workers.protocol import Flow

#: From ``linux/netlink.h``, ``linux/sock_diag.h`` and ``linux/inet_diag.h``.
_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_INFO: Final = 2
_ESTABLISHED: Final = 1
_HEADER: Final = struct.Struct("=IHHII")
#: ``inet_diag_req_v2``; the requested address is empty.
_QUESTION: Final = struct.Struct("=BBBxI48x")
#: ``inet_diag_msg``, 72 bytes: family, ports and addresses of the ends; then queues and inode.
_ENDS: Final = struct.Struct(">B3xHH16s16s")
_QUEUES: Final = struct.Struct("=56xII4xI")
_ATTRIBUTE: Final = struct.Struct("=HH")
#: ``tcp_info``: backoff, unacknowledged packets, ages in ms, rtt; then the counters. Kernels only
#: add to its end, and kernels before 4.10 have no counters.
_TCP_INFO: Final = struct.Struct("=4xB19xI16xI8xI8xI28xI16x2Q24x4Q")
_BUFFER_BYTES: Final = 64 << 10
#: The kernel answers within the call.
_ANSWER_S: Final = 1.0
#: After this many reads all connections are reported again: reports get lost, and controllers
#: restart.
_NUM_LOOKS: Final = 8
#: Worker and addresses of a connection.
_Key: TypeAlias = tuple[str, tuple[str, int], tuple[str, int]]


class Sockets:
    """Reads the connections of some processes."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._owners: dict[int, str] = {}
        self._told: dict[_Key, tuple[int, ...]] = {}
        self._num_looks = 0

    def look(self, pids: Mapping[str, int]) -> tuple[Flow, ...] | None:
        """Return the connections of trainers that changed since the last call, or back off.

        Return None if the kernel does not answer. ``pids`` has the process of each worker.
        """
        if not pids:
            return ()
        try:
            answers = list(_connections())
        except OSError:
            return None
        self._find_owners({inode for inode, _ in answers}, pids)
        if not self._num_looks % _NUM_LOOKS:
            self._told = {}
        self._num_looks += 1
        flows: list[Flow] = []
        told: dict[_Key, tuple[int, ...]] = {}
        for inode, answer in answers:
            worker = self._owners[inode]
            flow = _flow(worker, answer) if worker else None
            if flow is not None:
                key = flow[:3]
                told[key] = (flow.acked_bytes, flow.received_bytes, flow.queued_bytes)
                if flow.backoff or self._told.get(key) != told[key]:
                    flows.append(flow)
        self._told = told
        return tuple(flows)

    def _find_owners(self, inodes: set[int], pids: Mapping[str, int]) -> None:
        """Find the worker of each socket, "" for those of other processes.

        Listing the files of a process costs more than everything else, so it is only done for new
        sockets.
        """
        if self._pids == pids and self._owners.keys() >= inodes:
            return
        self._pids = dict(pids)
        found = {inode: worker for worker, pid in pids.items() for inode in _sockets_of(pid)}
        self._owners = {inode: found.get(inode, "") for inode in inodes}


def _sockets_of(pid: int) -> Iterator[int]:
    # The process, or one of its files, may be gone.
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(path.readlink())
                if target.startswith("socket:["):
                    yield int(target[8:-1])


def _connections() -> Iterator[tuple[int, bytes]]:
    """Yield each established connection of the machine: its inode and the kernel's data on it."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(_ANSWER_S)
            asked = _QUESTION.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 1 << _ESTABLISHED)
            size = _HEADER.size + len(asked)
            kernel.send(_HEADER.pack(size, _BY_FAMILY, _REQUEST | _DUMP, 1, 0) + asked)
            yield from _answers(kernel)


def _answers(kernel: socket.socket) -> Iterator[tuple[int, bytes]]:
    while True:
        content = kernel.recv(_BUFFER_BYTES)
        at = 0
        while at < len(content):
            size, kind, *_ = _HEADER.unpack_from(content, at)
            if kind == _DONE:
                return
            message = content[at + _HEADER.size : at + size]
            if kind == _ERROR:
                code = -int.from_bytes(message[:4], sys.byteorder, signed=True)
                raise OSError(code, os.strerror(code))
            yield _QUEUES.unpack_from(message)[2], message
            at += (size + 3) & ~3


def _flow(worker: str, answer: bytes) -> Flow | None:
    """Return the connection in an answer; None if the kernel is too old."""
    family, here_port, there_port, here, there = _ENDS.unpack_from(answer)
    unread, queued, _ = _QUEUES.unpack_from(answer)
    at = _QUEUES.size
    while at + _ATTRIBUTE.size <= len(answer):
        size, kind = _ATTRIBUTE.unpack_from(answer, at)
        if kind == _INFO and size - _ATTRIBUTE.size >= _TCP_INFO.size:
            backoff, in_flight, sent_ms, heard_ms, rtt_us, repeated, acked, received, *rest = (
                _TCP_INFO.unpack_from(answer, at + _ATTRIBUTE.size)
            )
            return Flow(
                worker, (_address(family, here), here_port), (_address(family, there), there_port),
                acked, received, queued, unread, in_flight, backoff, repeated, sent_ms, heard_ms,
                rtt_us, *rest,
            )  # fmt: skip
        at += (size + 3) & ~3
    return None


@lru_cache(maxsize=4096)
def _address(family: int, content: bytes) -> str:
    """Return the address as text, the same at both ends."""
    if family == socket.AF_INET:
        return socket.inet_ntoa(content[:4])
    address = ipaddress.IPv6Address(content)
    return str(address.ipv4_mapped or address)
