"""Runs processes that read ahead: they get calls in turn, and results come back in that order.

A call and a result are one message each through a pipe, without threads. With batches of some
kilobytes, the hand-overs in a pool of the standard library took longer than reading.
"""

import fcntl
import io
import multiprocessing
import os
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from workers.errors import DataError
from workers.parent_death import end_with_parent

#: Larger tensors go through shared memory, which costs as much as copying some hundred kilobytes.
_COPIED_BYTES_MAX: Final = 1 << 20
_F_SETPIPE_SZ: Final = 1031


class Readers:
    """Processes forked from this one. They end when it ends, or at ``close``.

    ``begin`` is called first in each; it returns the first argument for every function. A call
    raises ``DataError`` if its process has died.
    """

    def __init__(self, num: int, begin: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._ends: list[tuple[Connection, Connection]] = []
        #: Number and process of the calls whose results have not been received, in order.
        self._turns: deque[tuple[int, int]] = deque()
        self._received: dict[int, tuple[Exception | None, Any]] = {}
        self._dropped: set[int] = set()
        self._num_calls = 0
        for _ in range(num):
            calls, our_calls = context.Pipe(duplex=False)
            our_results, results = context.Pipe(duplex=False)
            for pipe in (our_calls, results):
                with suppress(OSError):
                    fcntl.fcntl(pipe.fileno(), _F_SETPIPE_SZ, _COPIED_BYTES_MAX)
            # Later processes must not inherit the other ends of the pipes: a process that dies must
            # close them.
            process = context.Process(target=_main, args=(begin, calls, results), daemon=True)
            process.start()
            calls.close()
            results.close()
            self._ends.append((our_calls, our_results))

    def submit(self, function: Callable[..., Any], *arguments: Any) -> int:
        """Make the next process call a function; return the number of the call."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        turn = number % len(self._ends)
        try:
            self._ends[turn][0].send_bytes(_pickled((function, arguments)))
        except OSError as error:
            raise _died() from error
        self._turns.append((number, turn))
        return number

    def result(self, number: int) -> Any:
        """Return the result of a call, once; raise the error that the call raised."""
        while number not in self._received:
            first, turn = self._turns.popleft()
            try:
                data = self._ends[turn][1].recv_bytes()
            except (EOFError, OSError) as error:
                raise _died() from error
            if first in self._dropped:
                self._dropped.remove(first)
            else:
                self._received[first] = ForkingPickler.loads(data)
        raised, value = self._received.pop(number)
        if raised is not None:
            raise raised
        return value

    def drop(self, numbers: Iterable[int]) -> None:
        """Discard the results of these calls, without waiting for them."""
        for number in numbers:
            if self._received.pop(number, None) is None:
                self._dropped.add(number)

    def close(self) -> None:
        """End the processes once they have finished their current call."""
        for calls, results in self._ends:
            # Closing is not enough: processes that were forked later hold this end, too.
            with suppress(OSError):
                calls.send_bytes(b"")
            calls.close()
            results.close()


def _died() -> DataError:
    return DataError(
        "DataLoader: a process that reads data has died (out of memory?); lower num_workers, or "
        "read in the training process with num_workers=0"
    )


def _main(begin: Callable[[], Any], calls: Connection, results: Connection) -> None:
    end_with_parent()
    _close_sockets()
    torch.set_num_threads(1)
    reader = begin()
    received: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    # Receive in a thread: two processes that both block in send would deadlock.
    threading.Thread(target=_receive_all, args=(calls, received), daemon=True).start()
    while (data := received.get()) is not None:
        try:
            function, arguments = ForkingPickler.loads(data)
            answer = _pickled((None, function(reader, *arguments)))
        except Exception as error:  # noqa: BLE001  it is raised again in the training process
            answer = _failed(error)
        try:
            results.send_bytes(answer)
        except OSError:
            return


def _receive_all(calls: Connection, received: queue.SimpleQueue[bytes | None]) -> None:
    with suppress(EOFError, OSError):
        while data := calls.recv_bytes():
            received.put(data)
    received.put(None)


def _failed(error: Exception) -> bytes:
    """Return an answer that raises the same error, with a note of where it was raised."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        answer = _pickled((error, None))
        ForkingPickler.loads(answer)
    except Exception:  # noqa: BLE001  whatever a class of the user's does when it is copied
        text = "".join(traceback.format_exception(error))
        return _pickled((DataError(f"DataLoader: the dataset raised\n{text}"), None))
    return answer


def _close_sockets() -> None:
    """Close the connections of the training process: peers must see when it leaves."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        # The listing's own descriptor is closed by now.
        with suppress(OSError):
            if entry.is_socket():
                os.close(int(entry.name))


class _Pickler(ForkingPickler):
    """Copies small tensors; torch would create shared memory for each."""

    def reducer_override(self, value: Any) -> Any:
        """Return a recipe that rebuilds a small tensor, or leave the tensor to torch."""
        is_plain = type(value) is Tensor and value.device.type == "cpu"
        if not is_plain or value.layout is not torch.strided or value.requires_grad:
            return NotImplemented
        if value.nbytes > _COPIED_BYTES_MAX or value.is_quantized or value.is_conj():
            return NotImplemented
        flat = value.contiguous().flatten().view(torch.uint8)
        return _tensor, (bytearray(flat.numpy().data), value.dtype, tuple(value.shape))


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, 5).dump(value)
    return buffer.getvalue()
