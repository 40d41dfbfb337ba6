"""The global generators of NumPy and Python, kept and put back by copying their memory.

Their own ``get_state`` and ``getstate`` make objects of 624 numbers, which takes 40 and 8 us;
a loader does it for every batch, and a copy takes 0.1 us. Where the memory is not as it should be
(another generator, another Python) they are used all the same.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from _random import Random
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

__all__ = ["HostNumbers", "host_numbers", "put_back"]

#: What both generators are, in parts; equal to another one if nothing was drawn between the two.
HostNumbers: TypeAlias = tuple[Any, ...]

#: NumPy's ``mt19937_state`` has 624 words, then a position; CPython's ``RandomObject`` begins with
#: the position.
_TWISTER_BYTES: Final = 625 * 4
#: An int, padding, and a double.
_NORMAL_BYTES: Final = 16


def host_numbers() -> HostNumbers:
    """Return what both generators are now."""
    of_python = _Opaque(random.getstate()) if _PYTHON is None else _PYTHON.raw
    generator = np.random.mtrand.get_bit_generator()
    memory = _numpy_memory(generator)
    if memory is None or _NORMAL is None:
        of_numpy, normal = _Opaque(np.random.get_state(legacy=False)), None  # noqa: NPY002
    else:
        of_numpy, normal = memory.raw, _NORMAL.raw
    return of_python, _OF_PYTHON.gauss_next, generator, of_numpy, normal


def put_back(numbers: HostNumbers) -> None:
    """Let both generators go on from there."""
    of_python, _OF_PYTHON.gauss_next, generator, of_numpy, normal = numbers
    if _PYTHON is None:
        random.setstate(of_python.state)
    else:
        _PYTHON.raw = of_python
    if np.random.mtrand.get_bit_generator() is not generator:
        np.random.mtrand.set_bit_generator(generator)
    if normal is None or _NORMAL is None:
        np.random.set_state(of_numpy.state)  # noqa: NPY002
    else:
        _numpy_memory(generator).raw, _NORMAL.raw = of_numpy, normal


@dataclass(frozen=True, slots=True, eq=False)
class _Opaque:
    """A state that is not compared: no two are equal."""

    state: Any


@functools.lru_cache(maxsize=1)
def _numpy_memory(generator: Any) -> Any:
    """Return the memory of a Mersenne Twister; None for another generator."""
    if type(generator) is not np.random.MT19937:
        return None
    memory = (ctypes.c_char * _TWISTER_BYTES).from_address(generator.ctypes.state_address)
    state = generator.state["state"]
    return memory if memory.raw == _words(*state["key"], state["pos"]) else None


def _normal_memory() -> Any:
    """Return where NumPy keeps whether there is a second normal number of a pair, and the number.

    None if that is not next to each other in a ``RandomState``, as in NumPy's ``aug_bitgen_t``.
    """
    scratch = np.random.RandomState(0)
    scratch.standard_normal()
    content = ctypes.string_at(id(scratch), type(scratch).__basicsize__)
    number = struct.pack("d", scratch.get_state(legacy=False)["gauss"])
    at = content.find(number) - _NORMAL_BYTES + len(number)
    if at < 0 or content[at : at + 8] != struct.pack("@q", 1):
        return None
    return (ctypes.c_char * _NORMAL_BYTES).from_address(id(_OF_NUMPY) + at)


def _python_memory() -> Any:
    """Return the memory of Python's generator; None if it is not where CPython has it."""
    if Random.__basicsize__ - object.__basicsize__ < _TWISTER_BYTES:
        return None
    memory = (ctypes.c_char * _TWISTER_BYTES).from_address(id(_OF_PYTHON) + object.__basicsize__)
    *words, position = random.getstate()[1]
    return memory if memory.raw == _words(position, *words) else None


def _words(*values: int) -> bytes:
    return np.array(values, np.uint32).tobytes()


#: The objects whose methods are the functions of ``random`` and ``numpy.random``.
_OF_PYTHON: Final[Any] = random.random.__self__  # type: ignore[attr-defined]
_OF_NUMPY: Final[Any] = np.random.standard_normal.__self__  # type: ignore[attr-defined]
_PYTHON: Final = _python_memory()
_NORMAL: Final = _normal_memory()
