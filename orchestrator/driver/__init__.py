"""The commands' work in the user's process: launch, follow, list, doctor, diagnose, convert."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.driver.asking import settings_of_script
    from orchestrator.driver.changes import require_unfinished
    from orchestrator.driver.console import (
        RunView,
        open_console,
        print_bounds,
        print_layouts,
        print_node_plans,
        print_plan,
        print_runs,
        print_status,
        status_view,
    )
    from orchestrator.driver.convert import convert_command
    from orchestrator.driver.demo import demo_directories, layout_overrides, run_demo
    from orchestrator.driver.diagnose import diagnose_paths, verdict_lines
    from orchestrator.driver.doctor import advice_lines, examine, report
    from orchestrator.driver.ending import ending_lines
    from orchestrator.driver.export import export_run
    from orchestrator.driver.follow import follow_run
    from orchestrator.driver.init import init_config
    from orchestrator.driver.launch import launch_run
    from orchestrator.driver.layout_plan import plan_layouts
    from orchestrator.driver.listing import list_runs
    from orchestrator.driver.logs import read_logs
    from orchestrator.driver.pages import RunIndex, open_page
    from orchestrator.driver.recovery_plan import plan_each_node, plan_losses
    from orchestrator.driver.run import Run
    from orchestrator.driver.run_diff import diff_runs
    from orchestrator.driver.signals import Interrupt, interrupts, raise_interrupt
    from orchestrator.driver.status import read_status, replay_run
    from orchestrator.driver.stop import await_end, kill_run, stop_run
    from orchestrator.driver.watch import watch_run


__getattr__ = lazy_door(__name__)
