"""The files for clusters, as those who read them judge them: Ray, KubeRay, bash."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from orchestrator.config import load
from orchestrator.core import Bounds
from orchestrator.errors import ConfigError

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "cluster_configs"
#: Of KubeRay 1.7.0's RayJob, without its descriptions.
SCHEMA = ROOT / "tests/fixtures/kuberay/rayjob_v1.json.gz"

CLUSTERS = sorted(CONFIGS.glob("*/cluster.yaml"))
EXAMPLES = sorted((*CONFIGS.glob("local/*.yaml"), *CONFIGS.glob("spot/*.yaml")))


def _name(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


def _closed(schema: Any) -> Any:
    """Return the schema with unknown keys refused: Kubernetes drops them without a word."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


@pytest.mark.parametrize("path", EXAMPLES, ids=_name)
def test_an_example_of_a_run_is_well_formed(path: Path) -> None:
    """It is data that no code imports, so nothing else notices when a key is renamed."""
    config = load(_name(path).removesuffix(".yaml"))

    assert config.workers.max >= config.workers.min


def test_only_examples_of_runs_are_offered() -> None:
    """A file for Ray or Kubernetes is no configuration of a run."""
    with pytest.raises(ConfigError) as refused:
        load("no/such")

    offered = str(refused.value).partition("come with everstep: ")[2].split(", ")
    assert offered == [_name(path).removesuffix(".yaml") for path in EXAMPLES]


@pytest.mark.parametrize("path", CLUSTERS, ids=_name)
def test_ray_up_accepts_a_cluster(path: Path) -> None:
    """The head has no room for workers, and spot nodes come only while a run asks for them."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(yaml.safe_load(path.read_text()))
    validate_config(prepared)

    kinds = prepared["available_node_types"]
    assert kinds[prepared["head_node_type"]]["resources"] == {"CPU": 0}
    assert kinds["spot"]["min_workers"] == 0


@pytest.mark.parametrize("kind", ["RayCluster", "RayJob"])
def test_kuberay_accepts(kind: str) -> None:
    """Every key must be one that it knows."""
    document = yaml.safe_load((CONFIGS / f"kuberay/{kind.lower()}.yaml").read_text())
    schema = _closed(json.loads(gzip.decompress(SCHEMA.read_bytes())))
    cluster = schema["properties"]["spec"]["properties"]["rayClusterSpec"]
    if kind == "RayCluster":
        schema["properties"]["spec"] = cluster

    jsonschema.Draft7Validator(schema).validate(document)

    assert document["kind"] == kind


def test_a_key_that_kuberay_does_not_know_is_found() -> None:
    """So the test before can fail."""
    document = yaml.safe_load((CONFIGS / "kuberay/rayjob.yaml").read_text())
    document["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 1
    schema = _closed(json.loads(gzip.decompress(SCHEMA.read_bytes())))

    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.Draft7Validator(schema).validate(document)


def test_a_job_has_the_cluster_that_is_tried_by_hand() -> None:
    """Two files that must not drift apart."""
    cluster = yaml.safe_load((CONFIGS / "kuberay/raycluster.yaml").read_text())
    job = yaml.safe_load((CONFIGS / "kuberay/rayjob.yaml").read_text())

    assert job["spec"]["rayClusterSpec"] == cluster["spec"]


def test_a_pod_is_gone_before_its_grace_period_is_over() -> None:
    """Ray drains a node for so long after SIGTERM; Kubernetes kills it at the end of the other.

    GKE gives the pods of a spot node 15 s, whatever they ask for
    (https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms).
    """
    cluster = yaml.safe_load((CONFIGS / "kuberay/raycluster.yaml").read_text())
    (group,) = cluster["spec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    drain_s = float(_variables(container)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])

    assert drain_s < min(pod["terminationGracePeriodSeconds"], 15)
    # The run leaves the node so long before: now, or a little later for a replacement to come.
    assert drain_s >= Bounds().drain_lead_s


def _variables(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"]}


def test_prometheus_finds_the_run_of_a_job() -> None:
    """The alert for a controller that is away knows its job, "namespace/name" of the monitor."""
    monitor = yaml.safe_load((CONFIGS / "kuberay/podmonitor.yaml").read_text())
    job = yaml.safe_load((CONFIGS / "kuberay/rayjob.yaml").read_text())["spec"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (head,) = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    (jobs,) = re.findall(r'up{job=~"(.*)"}', (ROOT / "dashboards/rules.yml").read_text())

    assert f"cluster.metrics_port={ports[endpoint['port']]}" in job["entrypoint"]
    assert re.fullmatch(jobs, f"default/{monitor['metadata']['name']}")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("slurm/*.sbatch")), ids=_name)
def test_bash_accepts_a_batch_script(path: Path) -> None:
    """Slurm is not here to run it."""
    subprocess.run(["/bin/bash", "-n", str(path)], check=True)
