"""The files for clusters, as those who read them judge them: Ray, KubeRay, bash."""

import gzip
import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.specifiers import SpecifierSet

from orchestrator.config import load
from orchestrator.core import Bounds
from orchestrator.driver.doctor import NodeKind, unserved
from orchestrator.errors import ConfigError
from workers.process import TUNABLE

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "cluster_configs"
#: Defaults of Ray 2.60 (``src/ray/common/ray_config_def.h``).
HEALTH_CHECKS, HEALTH_CHECK_PERIOD_S = 5, 3.0
#: Schema of KubeRay 1.7.0's RayJob, without its descriptions.
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


@pytest.mark.parametrize("path", CLUSTERS, ids=_name)
def test_a_cluster_has_nodes_for_every_alternative_of_the_example(path: Path) -> None:
    """Ray gives a node no such label by itself; a request for one would wait for ever."""
    kinds = yaml.safe_load(path.read_text())["available_node_types"]
    example = (CONFIGS / "spot/gpus.yaml").read_text()
    block = re.findall(r"^# (capacity:|  - \{.*\})$", example, flags=re.MULTILINE)
    capacity = yaml.safe_load("\n".join(block))["capacity"]
    config = load("spot/gpus", [f"capacity={json.dumps(capacity)}"])

    assert [each["spot"] for each in capacity] == [True, False]
    # Those of which a user has allowed none yet count as well: doctor tells him so.
    types = [
        NodeKind(name=name, resources=kind["resources"], labels=kind.get("labels", {}))
        for name, kind in kinds.items()
    ]
    assert unserved(config, there=[], types=types) == []


def test_a_run_may_name_the_zone_of_a_cluster_that_has_one() -> None:
    """The autoscaler knows a type of node by its labels alone."""
    cluster = yaml.safe_load((CONFIGS / "gcp/cluster.yaml").read_text())
    zone = cluster["provider"]["availability_zone"]
    labels = [kind.get("labels", {}) for kind in cluster["available_node_types"].values()]

    assert {each.get("ray.io/availability-zone") for each in labels if each} == {zone}


@pytest.mark.parametrize("path", CLUSTERS, ids=_name)
def test_a_node_is_set_up_with_a_python_that_everstep_takes(path: Path, tmp_path: Path) -> None:
    """Images come with Python 3.10. The commands run as Ray runs them, on an image of stand-ins."""
    from ray.autoscaler._private.command_runner import _with_interactive
    from ray.autoscaler._private.util import prepare_config

    home, image = tmp_path / "home", tmp_path / "image"
    home.mkdir()
    image.mkdir()
    stubs = {
        "curl": f"echo 'mkdir -p ~/.local/bin && cp {image}/made-uv ~/.local/bin/uv'",
        "made-uv": f'echo "uv $*" >> ~/calls; install -D {image}/made-pip ~/env/bin/pip',
        "made-pip": 'echo "pip $* $GLIBC_TUNABLES" >> ~/calls',
        "pip": "echo this is the pip of the image >&2; exit 1",
        "sudo": "cat > /dev/null",
    }
    for name, does in stubs.items():
        (image / name).write_text(f"#!/bin/bash\n{does}\n")
        (image / name).chmod(0o755)
    (home / ".bashrc").touch()
    (home / ".profile").write_text(f"PATH={image}:$PATH\n")

    prepared = prepare_config(yaml.safe_load(path.read_text()))
    for commands in ("head_setup_commands", "worker_setup_commands"):
        for command in prepared[commands]:
            words = shlex.split(" ".join(_with_interactive(command)))
            environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
            subprocess.run(
                words, env=environment, check=True, stdin=subprocess.DEVNULL, start_new_session=True
            )

    calls = (home / "calls").read_text()
    (wanted,) = set(re.findall(r"--python (\S+)", calls))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(project["requires-python"]).contains(wanted)
    assert f"pip install {home}/everstep[ray" in calls
    assert TUNABLE in calls


@pytest.mark.parametrize("path", CLUSTERS, ids=_name)
def test_a_node_gets_the_checkout_and_not_what_belongs_to_this_machine(path: Path) -> None:
    """An environment and a history are many times as large, and sent to every node."""
    cluster = yaml.safe_load(path.read_text())

    assert cluster["file_mounts"] == {"~/everstep": "."}
    assert ".git" in cluster["rsync_exclude"]
    assert cluster["rsync_filter"] == [".gitignore"]


@pytest.mark.parametrize("path", CLUSTERS, ids=_name)
def test_ray_is_started_as_doctor_advises(path: Path) -> None:
    """With few open files, or snapshots through the caches, a run is slower or fails later."""
    cluster = yaml.safe_load(path.read_text())
    starts = [
        next(command for command in cluster[f"{node}_start_ray_commands"] if "ray start" in command)
        for node in ("head", "worker")
    ]

    assert all(start.startswith("ulimit -n 65536; ") for start in starts)


def test_ray_ends_a_silent_node_neither_within_seconds_nor_after_a_minute() -> None:
    """A node that is busy for a while is not ended; a lost one is replaced soon."""
    clusters = [yaml.safe_load(path.read_text())["head_start_ray_commands"] for path in CLUSTERS]
    pods = yaml.safe_load((CONFIGS / "kuberay/raycluster.yaml").read_text())
    (pod,) = pods["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    slurm = (CONFIGS / "slurm/run.sbatch").read_text()
    said = [*map(" ".join, clusters), slurm, "\n".join(map("=".join, _variables(pod).items()))]

    for each in said:
        (timeout_ms,) = re.findall(r"\bRAY_health_check_timeout_ms=(\d+)", each)
        assert 20 <= HEALTH_CHECKS * (HEALTH_CHECK_PERIOD_S + int(timeout_ms) / 1000) <= 60


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


def test_an_image_has_the_ray_of_the_cluster_and_what_the_package_is_made_of() -> None:
    """Nodes with another Ray than the head are refused, after minutes of pulling an image."""
    text = (CONFIGS / "Dockerfile").read_text()
    ignored = (CONFIGS / "Dockerfile.dockerignore").read_text().split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (release,) = re.findall(
        r"^FROM rayproject/ray:([\d.]+)-py311-\$\{DEVICE\}$", text, re.MULTILINE
    )
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]

    assert f"\nray=={release}\n" in (ROOT / "constraints.txt").read_text()
    for name in ("rayjob", "raycluster"):
        assert f"rayVersion: {release}\n" in (CONFIGS / f"kuberay/{name}.yaml").read_text()
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()
    needed = [*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "LICENSE"]
    assert {f"!{name}" for name in (*needed, "pyproject.toml", "constraints.txt")} <= set(ignored)
    assert all((ROOT / name[1:]).exists() for name in ignored if name.startswith("!"))
