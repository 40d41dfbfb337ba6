"""Check whether machines compute alike, by checksums of the results of a few kernels.

The order of additions depends on the instruction set, the libraries, the type of GPU and the number
of threads. Two machines with equal checksums may still differ in a kernel that is not tried here.
"""

import functools
import zlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

#: Rows, columns and heads: enough for the blocks and vectors of kernels, and a few milliseconds.
_ROWS, _COLUMNS, _HEADS = 96, 320, 4


@functools.cache
def checksums(device: torch.device, dtype: torch.dtype) -> dict[str, int]:
    """Return a checksum of the result of each kernel, by its name in messages.

    It is computed once per process, and changes no other random numbers.
    """
    numbers = torch.Generator().manual_seed(0)
    # Integers divided by a power of two have the same bits on every machine.
    drawn = torch.randint(-(2**23), 2**23, (2, _ROWS, _COLUMNS), generator=numbers, device="cpu")
    one, other = (drawn / 2.0**22).to(device, dtype)
    with torch.no_grad():
        found = {name: kernel(one, other).cpu().contiguous() for name, kernel in _KERNELS.items()}
    return {name: zlib.crc32(x.view(torch.uint8).numpy().tobytes()) for name, x in found.items()}


def described(device: torch.device) -> str:
    """Return, for people, the properties of this machine that may differ from others."""
    if device.type == "cuda":
        name, library = torch.cuda.get_device_name(device), f", CUDA {torch.version.cuda}"
    else:
        name = torch.backends.cpu.get_cpu_capability()
        library = f", threads: {torch.get_num_threads()}"
    return f"{name}, torch {torch.__version__}{library}"


def machine_kind(device: torch.device) -> int:
    """Return a number that is equal on machines that compute an update alike."""
    return zlib.crc32(repr(checksums(device, torch.float32)).encode())


def _attention(one: Tensor, other: Tensor) -> Tensor:
    query, key = (x.unflatten(-1, (_HEADS, -1)).transpose(0, 1)[None] for x in (one, other))
    return functional.scaled_dot_product_attention(query, key, key, is_causal=True)


def _update(one: Tensor, other: Tensor) -> Tensor:
    """Return the computation of an optimizer like Adam for each element."""
    return one.lerp(other, 0.1).addcdiv(other, (one * one).sqrt().add(1e-8), value=-0.01)


_KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda one, other: one @ other.T,
    "attention": _attention,
    "sums": lambda one, other: torch.cat([one.sum(0), (one * other).sum(1), one.norm()[None]]),
    "normalization": lambda one, _: functional.layer_norm(one, [_COLUMNS]).log_softmax(-1),
    "functions of elements": lambda one, other: functional.gelu(one) + other.exp().tanh(),
    "updates": _update,
}
