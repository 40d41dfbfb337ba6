"""Fingerprints: equal for equal samples, in any process; different for different ones."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from workers.data.fingerprint import fingerprint


@dataclass
class Pair:
    left: Any
    right: Any


def changed(value: Any) -> list[Any]:
    """Return the value with its first, middle or last element changed."""
    values = []
    for at in (0, value.size // 2, value.size - 1):
        values.append(value.copy())
        values[-1].reshape(-1)[at] += 1
    return values


@pytest.mark.parametrize("size", [1, 7, 600, 100_000])
@pytest.mark.parametrize("dtype", ["int64", "float32", "uint8"])
def test_large_arrays_differ_at_either_end_and_in_the_middle(size: int, dtype: str) -> None:
    """As tensors, too, and within mappings, lists and objects."""
    whole = np.arange(size).astype(dtype)
    for other in changed(whole):
        for made in (
            lambda array: array,
            torch.from_numpy,
            lambda array: {"x": torch.from_numpy(array)},
            lambda array: ("x", [array]),
            lambda array: Pair(1, array),
        ):
            assert fingerprint(made(whole)) == fingerprint(made(whole.copy()))
            assert fingerprint(made(whole)) != fingerprint(made(other)), (size, dtype)


SAMPLES = [
    1,
    2,
    1.0,
    True,
    None,
    "text",
    "text" * 500,
    "text" * 499 + "tent",
    b"text",
    [],
    (),
    [1, 2],
    [2, 1],
    list(range(1000)),
    list(range(999)),
    {"x": 1},
    {"y": 1},
    {"x": [1]},
    Pair(1, 2),
    Pair(2, 1),
    torch.tensor(1.0),
    torch.tensor([1.0]),
    torch.tensor([1.0], dtype=torch.bfloat16),
    torch.tensor([2.0], dtype=torch.bfloat16),
    torch.tensor([1.0], requires_grad=True) * 3,
    np.array(["a", None], dtype=object),
    np.array(["b", None], dtype=object),
    np.arange(12).reshape(3, 4).T,
    np.arange(12).reshape(4, 3),
]


def test_samples_of_all_kinds_differ() -> None:
    found = [fingerprint(sample) for sample in SAMPLES]
    alike = [
        (SAMPLES[a], SAMPLES[b])
        for a in range(len(found))
        for b in range(a)
        if found[a] == found[b]
    ]
    assert not alike


def test_another_process_finds_the_same() -> None:
    """Another process hashes text differently."""
    code = (
        "from tests.unit.workers.data.test_fingerprint import SAMPLES, fingerprint\n"
        "print([fingerprint(sample) for sample in SAMPLES])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "PATH": ""},
    )
    assert told.stdout.strip() == str([fingerprint(sample) for sample in SAMPLES])


def test_what_contains_itself_ends() -> None:
    loop: list[Any] = [[]]
    loop[0].append(loop)
    assert isinstance(fingerprint(loop), int)
