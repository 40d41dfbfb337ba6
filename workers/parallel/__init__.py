"""The mesh of an attempt, the model spread over it, and its state as local tensors."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.parallel.fsdp import (
        Piece,
        drop_gathered,
        fsdp_modules,
        materialize,
        pieces,
        spread,
    )
    from workers.parallel.mesh import Mesh, build_mesh

__all__ = [
    "Mesh",
    "Piece",
    "build_mesh",
    "drop_gathered",
    "fsdp_modules",
    "materialize",
    "pieces",
    "spread",
]

__getattr__ = lazy_door(
    __name__,
    {
        "workers.parallel.fsdp": (
            "Piece",
            "drop_gathered",
            "fsdp_modules",
            "materialize",
            "pieces",
            "spread",
        ),
        "workers.parallel.mesh": ("Mesh", "build_mesh"),
    },
)
