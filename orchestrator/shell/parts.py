"""The parts of one run in the shell and their wiring."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import ray

from orchestrator.config import RunConfig
from orchestrator.core import Phase
from orchestrator.core import events as ev
from orchestrator.shell import storage
from orchestrator.shell.capacity import (
    DRAINED,
    ActorPool,
    Capacity,
    Keepers,
    LinkWatch,
    Nodes,
    Rendezvous,
    Workers,
)
from orchestrator.shell.evidence import Evidence
from orchestrator.shell.inbox import Inbox
from orchestrator.shell.loggers import Loggers
from orchestrator.shell.memory import CadenceWatch, Orders, ProtectionWatch, Snapshots
from orchestrator.shell.names import RunNames
from orchestrator.shell.observer import Observer
from orchestrator.shell.others import Others
from ucp_core.storage import Owner, held, join, open_store
from workers import keeper, process
from workers.protocol import CHECKPOINTS


class Parts:
    """Builds the parts; ``state`` is the run as folded so far. See ``Controller`` for the rest."""

    def __init__(
        self,
        *,
        run_id: str,
        config: RunConfig,
        claim: int,
        token: str,
        controller: Any,
        post: Callable[[ev.Event], None],
        on_keeper: Callable[[str], None],
    ) -> None:
        self.config = config
        self.names = RunNames(run_id)
        self.rules = config.rules()
        self.store, self.path = open_store(config.run.directory)
        self.owner = Owner(self.store, self.path, claim)
        # If a script that runs alone has taken the run over, there is a newer claim.
        self.owner.require()
        self._held = ExitStack()
        self._held.enter_context(held(self.store, self.path, shared=True))
        spool = self.names.spool(ray.get_runtime_context().get_actor_id() or "")
        self.begun = storage.begin_incarnation(
            self.store, self.path, config, claim_number=claim, token=token, spool=spool
        )
        self.state = self.begun.state
        self.token = storage.run_token(self.store, self.path)
        self.inbox = Inbox(at_s=self.begun.clock.at_s, post=post)
        self._build_storage(spool)
        self._build_capacity(controller, on_keeper)
        self._build_watches()

    def _build_storage(self, spool: str) -> None:
        begun, train = self.begun, self.config.train
        journal_path = storage.segment_path(self.path, begun.number)
        sender = storage.Sender(self.store, journal_path=journal_path, spool=spool)
        self.journal = storage.JournalFile(
            self.store,
            self.path,
            incarnation=begun.number,
            before_bytes=begun.journal_bytes,
            sender=None if self.store.appends else sender,
        )
        self.compaction = storage.CompactionFile(
            self.store, self.path, rules=self.rules, compacted_bytes=begun.compacted_bytes
        )
        self.outputs = storage.RunOutputs(
            self.store,
            self.path,
            begun.stats,
            sender=sender,
            num_written=begun.num_incidents_written,
            samples_per_step=train.global_batch,
            tokens_per_step=self.config.tokens_per_step,
        )
        self.loggers = Loggers(self.config, store=self.store, path=self.path, owner=self.owner)

    def _build_capacity(self, controller: Any, on_keeper: Callable[[str], None]) -> None:
        config, names, inbox = self.config, self.names, self.inbox
        own_host = ray.util.get_node_ip_address()
        self.rendezvous = Rendezvous(own_host)
        self.capacity = Capacity(
            inbox,
            names=names,
            alternatives=config.alternatives(),
            group=config.parallel.tp,
        )
        self.nodes = Nodes(
            inbox,
            needs=[each.resources for each in config.alternatives()],
            rack_label=config.cluster.rack_label,
            here=ray.get_runtime_context().get_node_id(),
            own_host=own_host,
            own_notice=keeper.NoticeWatch(keeper.sources_of(**config.watched())).notice,
            drained={
                node.name: node.leave_by_s
                for node in self.state.fleet.nodes.values()
                if node.is_taken and node.notice == DRAINED
            },
        )
        boot = {"run_url": config.run.directory, "settings": config.settings()}
        self.keepers = Keepers(
            inbox,
            nodes=self.nodes,
            pool=ActorPool(
                keeper.Keeper,
                keeper.OPTIONS,
                names=names,
                name=names.keeper,
                boot={
                    **boot,
                    "controller": controller,
                    "claim": self.owner.claim,
                    "notices": config.watched(),
                },
            ),
            on_keeper=on_keeper,
            bounds=self.rules.bounds,
        )
        self.worker_pool = ActorPool(
            process.Worker,
            process.OPTIONS,
            names=names,
            name=names.worker,
            boot={**boot, "on_cpu": "GPU" not in config.worker_resources()},
        )
        self.workers = Workers(inbox, nodes=self.nodes, keepers=self.keepers, pool=self.worker_pool)

    def _build_watches(self) -> None:
        config, snapshot = self.config, self.config.snapshot
        self.snapshots = Snapshots(
            nodes=self.nodes,
            store=self.store,
            checkpoints=join(self.path, CHECKPOINTS),
            total_steps=config.train.steps,
        )
        self.orders = Orders(self.nodes, self.owner.claim)
        self.protection = ProtectionWatch(
            snapshots=self.snapshots, tolerance=snapshot.tolerance if snapshot.every_steps else 0
        )
        self.observer = Observer(
            self.inbox,
            on_formed=self.workers.note_formed,
            node_silent=self.workers.node_silent,
            patience=config.recovery.patience,
            parallel=config.parallel,
        )
        self.evidence = Evidence(
            keepers=self.keepers,
            reports=self.observer.reports,
            store=self.store,
            path=self.path,
            num_incidents=len(self.begun.stats.incidents),
        )
        self.links = LinkWatch(
            self.observer.flows,
            self.inbox,
            suspect=self.observer.suspect_links,
            views=self.nodes.views,
            attempt=self._training,
        )
        self.others = Others(self.inbox, names=self.names)
        self.cadence = CadenceWatch(
            self.inbox,
            workers=self.workers,
            rules=self.rules.cadence,
            snapshot=snapshot,
            checkpoint=config.checkpoint,
        )

    def _training(self) -> tuple[int, tuple[str, ...]]:
        """Return the attempt that trains and the node of each rank; (0, ()) while none trains."""
        attempt, nodes = self.state.attempt, self.state.fleet.nodes
        is_training = self.state.phase is Phase.TRAINING
        return attempt.number, tuple(nodes[n].name for n in attempt.nodes if is_training)
