"""Recognise the cloud of this machine by its firmware, without the network."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

#: Clouds with known metadata services.
CLOUDS: Final = ("aws", "gcp", "azure")
_DMI: Final = Path("/sys/class/dmi/id")
_FILES: Final = (
    "sys_vendor", "product_name", "product_version", "board_vendor", "chassis_asset_tag",
)  # fmt: skip
#: Hyper-V also runs in other places, so the vendor alone does not prove Azure (cloud-init).
_AZURE_TAG: Final = "7783-7084-3265-9085-8269-3286-77"
_GPUS: Final = Path("/proc/driver/nvidia/gpus")


def read_dmi() -> dict[str, str]:
    """Return the firmware's facts about this machine, by the names of files in /sys."""
    found = {}
    for name in _FILES:
        with contextlib.suppress(OSError):
            found[name] = (_DMI / name).read_text(encoding="utf-8", errors="replace").strip()
    return found


def recognised(dmi: Mapping[str, str] | None = None) -> str:
    """Return one of ``CLOUDS``, or "none"; ``dmi`` is by default what ``read_dmi`` returns."""
    said = read_dmi() if dmi is None else dmi
    # Amazon's older machines run on Xen, and only the version names Amazon: "4.11.amazon".
    if any("amazon" in text.lower() for text in said.values()):
        return "aws"
    if said.get("sys_vendor") == "Google" or said.get("product_name") == "Google Compute Engine":
        return "gcp"
    return "azure" if said.get("chassis_asset_tag") == _AZURE_TAG else "none"


def has_gpus() -> bool:
    """Return whether this machine has NVIDIA GPUs; Google cannot migrate one that has."""
    return _GPUS.is_dir()
