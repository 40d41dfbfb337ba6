"""The configuration of a run: its schema, its sources, its checks."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.config.documented import commented_yaml, json_schema
    from orchestrator.config.loading import demo_config, load, load_for_gpus
    from orchestrator.config.preflight import job_of, run_preflight
    from orchestrator.config.schema import RunConfig
    from orchestrator.config.sections import Alternative
    from orchestrator.config.source_text import Source


__getattr__ = lazy_door(__name__)
