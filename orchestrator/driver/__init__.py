"""The process that a user starts: launch, follow, doctor, convert, demo."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.driver.console import RunView, print_bounds, print_plan, sources_text
    from orchestrator.driver.convert import convert_command
    from orchestrator.driver.demo import run_demo
    from orchestrator.driver.doctor import address_of, advice_lines, examine
    from orchestrator.driver.findings import report
    from orchestrator.driver.launch import launch_run, stop_run
    from orchestrator.driver.status import contact, plan_losses, read_status, replay_run

__all__ = [
    "RunView",
    "address_of",
    "advice_lines",
    "contact",
    "convert_command",
    "examine",
    "launch_run",
    "plan_losses",
    "print_bounds",
    "print_plan",
    "read_status",
    "replay_run",
    "report",
    "run_demo",
    "sources_text",
    "stop_run",
]

__getattr__ = lazy_door(
    __name__,
    {
        "orchestrator.driver.console": ("RunView", "print_bounds", "print_plan", "sources_text"),
        "orchestrator.driver.convert": ("convert_command",),
        "orchestrator.driver.demo": ("run_demo",),
        "orchestrator.driver.doctor": ("address_of", "advice_lines", "examine"),
        "orchestrator.driver.findings": ("report",),
        "orchestrator.driver.launch": ("launch_run", "stop_run"),
        "orchestrator.driver.status": ("contact", "plan_losses", "read_status", "replay_run"),
    },
)
