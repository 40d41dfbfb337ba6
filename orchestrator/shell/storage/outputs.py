"""The files of a run beside its journal: contact, incidents, report, summary."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import ray

from orchestrator.core import RunStats, incident_folder
from orchestrator.errors import OrchestratorError
from orchestrator.report import CONTACT, SUMMARY, write_report
from orchestrator.shell.storage.sender import Sender
from ucp_core.errors import UcpError
from ucp_core.storage import Store, join
from workers.protocol import RESULT

log = logging.getLogger(__name__)


class RunOutputs:
    """Folds the journal into statistics as it grows, and writes incidents when they are final.

    Incidents up to number ``num_written`` are already written.
    """

    def __init__(
        self,
        store: Store,
        run_path: str,
        stats: RunStats,
        *,
        sender: Sender,
        num_written: int,
        samples_per_step: int,
        tokens_per_step: int,
    ) -> None:
        self._sender = sender
        self._samples_per_step = samples_per_step
        self._tokens_per_step = tokens_per_step
        self._store = store
        self._path = run_path
        self.stats = stats
        self._num_written = num_written

    def announce(self, status_url: str, *, head_returns: bool) -> None:
        """Write how to reach this controller, and whether a lost head returns."""
        self._write(
            CONTACT,
            {
                "url": status_url,
                "pid": os.getpid(),
                "node": ray.get_runtime_context().get_node_id(),
                "ray_address": ray.get_runtime_context().gcs_address,
                "namespace": ray.get_runtime_context().namespace,
                "head_returns": head_returns,
            },
        )

    def last_port(self) -> int:
        """Return the port of the previous controller; 0 if there was none."""
        try:
            url = json.loads(self._store.read(join(self._path, CONTACT)))["url"]
            return urlsplit(url).port or 0
        except (UcpError, ValueError, KeyError, TypeError):
            return 0

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Count journaled records, and write the incidents that are final."""
        for record in records:
            self.stats.add(record)
        self._write_incidents(final=False)

    def close(self, url: str) -> None:
        """Write the report, then the summary: it comes last because it says that the run is over.

        This waits for storage. ``url`` is that of the run directory.
        """
        self._write_incidents(final=True)
        self._sender.close()
        result_path = join(self._path, RESULT)
        result: dict[str, Any] = {"weights_digest": None, "final_loss": None}
        if self._store.exists(result_path):
            result |= json.loads(self._store.read(result_path))
        summary = self.stats.summary()
        summary["samples_seen"] = summary["steps"] * self._samples_per_step
        per_million = self.stats.usd_per_million_tokens(self._tokens_per_step)
        summary["usd_per_million_tokens"] = per_million
        document = {**result, **summary, "report": None}
        try:
            document["report"] = write_report(url, summary=document, stats=self.stats)
        except (UcpError, OrchestratorError) as error:
            # `everstep report` can write it too, so the run ends without it.
            log.warning("report.html is not written; `everstep report` writes it: %s", error)
        self._store.write_atomic(join(self._path, SUMMARY), _printed(document), fsync=False)

    def _write_incidents(self, *, final: bool) -> None:
        incidents = self.stats.incidents
        while self._num_written < len(incidents):
            incident = incidents[self._num_written]
            if self.stats.is_open(incident) and not final:
                return
            self._num_written += 1
            folder = incident_folder(self._num_written)
            self._write(join(folder, "incident.json"), incident.to_json())

    def _write(self, name: str, document: dict[str, Any]) -> None:
        self._sender.put(join(self._path, name), _printed(document))


def _printed(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode()
