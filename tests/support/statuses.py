"""A document of ``everstep status``, for the tests of what people read."""

from typing import Any

NODE = "f6a909039539fb880232d2aefe062783cc607b650ff1be024369a081"


def status_document(**changes: Any) -> dict[str, Any]:
    """Return the status of a run that trains, with ``changes``."""
    worker = {"worker": "w0002", "node": NODE, "pid": 23457, "state": "training"}
    standby = {"worker": "w0005", "node": NODE, "pid": None, "state": "starting"}
    return {
        "phase": "training",
        "attempt": 2,
        "step": 95,
        "goal": 400,
        "loss": 2.26571,
        "validation_loss": None,
        "steps_per_s": 3.9,
        "phase_for_s": 41.2,
        "incidents": [],
        "layout": "dp_shard=4",
        "workers": [
            {**worker, "rank": 0, "step": 96, "phase": "backward", "last_heartbeat_s": 0.893},
        ],
        "standbys": [{**standby, "step": None, "phase": None, "last_heartbeat_s": None}],
        "nodes": [
            {
                "node": NODE,
                "raylet_pid": 23231,
                "keeper_pid": None,
                "state": "alive",
                "reservations": [2, 3],
            }
        ],
        "pending_capacity": 2,
        "capacity": [
            {
                "alternative": "0 spot",
                "asked": 4,
                "granted": 2,
                "refused": 2,
                "waits_s": 70.0,
                "refused_for_s": 12.0,
                "grant_s": None,
                "why": "no machine left",
            },
            {
                "alternative": "1 on-demand",
                "asked": 2,
                "granted": 0,
                "refused": 0,
                "waits_s": 11.0,
                "refused_for_s": 0.0,
                "grant_s": None,
                "why": "",
            },
        ],
        "cost": {"usd": 1.5, "usd_per_hour": 0.8, "usd_per_million_tokens": 0.25},
        "redundancy": {
            "step": 95,
            "stored_step": 90,
            "node_losses_survived": 1,
            "mechanism": "partner copy",
            "reason": "partner copy [of all]",
            "problems": ["storage has been silent for 12 s"],
        },
        "cadence": {
            "snapshot_steps": 1,
            "snapshot_taken_steps": 1,
            "checkpoint_steps": 10,
            "cost_share": 0.00714,
            "cost_share_max": 0.02,
            "problems": [],
            "reason": "as configured",
        },
        "loaded": {"local memory": 5_000_000},
        "passed_over": ["step-00000004: manifest.json is cut short"],
        "directory": "runs/a",
        "evidence": "incidents/0003",
        "cause": {
            "kind": "crash",
            "guilty": ["w0001"],
            "evidence": "its process died",
            "at_s": 9.0,
        },
        "shared": None,
        "waits_for": "",
        "reason": "",
        "bounds_s": {"beat": 0.1, "hang": 5.221},
        "controller": "alive",
        **changes,
    }
