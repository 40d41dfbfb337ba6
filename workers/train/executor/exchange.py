"""Exchange values between all ranks of an attempt. Every rank makes each call, and waits."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.collectives import on_host, settled


def all_agree(agreed: bool, device: torch.device) -> bool:  # noqa: FBT001  the vote itself
    """Return whether every rank votes True."""
    vote = torch.tensor([int(agreed)], device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(on_host(vote)[0])


def are_everywhere(texts: Sequence[str], device: torch.device) -> list[bool]:
    """Return, for each text, whether it is the same on all ranks."""
    keys = (hashlib.sha256(text.encode()).digest() for text in texts)
    numbers = [int.from_bytes(key[:8], "little") >> 2 for key in keys]
    ends = torch.tensor([*numbers, *(-number for number in numbers)], device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MIN)
    found = on_host(ends)
    pairs = zip(found[: len(texts)], found[len(texts) :], strict=True)
    return [least == -negative for least, negative in pairs]


def by_rank(mine: Tensor) -> list[Any]:
    """Return the numbers of all ranks, by rank: a list each, or a number if ``mine`` has no dim."""
    table = mine.new_zeros(dist.get_world_size(), *mine.shape)
    table[dist.get_rank()] = mine
    dist.all_reduce(table)
    return on_host(table)


def exchanged(value: Any, device: torch.device) -> list[Any]:
    """Return the JSON values of all ranks, by rank."""
    text = json.dumps(value).encode()
    lengths = by_rank(torch.tensor(len(text), device=device))
    texts = torch.zeros(len(lengths), max(lengths), dtype=torch.uint8, device=device)
    texts[dist.get_rank(), : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.all_reduce(texts)
    rows = settled(texts).cpu()
    return [json.loads(bytes(rows[at, :length].numpy())) for at, length in enumerate(lengths)]


def summed(whole: Tensor) -> Tensor:
    """Return one rank's part of each element; the other ranks have zeros."""
    # The sum is over bytes: zeros from the other ranks change none, whatever the dtype.
    dist.all_reduce(whole.reshape(-1).view(torch.uint8))
    return settled(whole)
