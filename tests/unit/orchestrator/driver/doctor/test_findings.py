"""The doctor finds what is wrong with a cluster, and nothing else."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.config import RunConfig, load
from orchestrator.driver.doctor import (
    Finding,
    Level,
    NodeFacts,
    NodeKind,
    diagnose,
    interface_problem,
    unserved,
)
from tests.support.metadata_server import AWS_ACTION, serve

HERE = NodeFacts(
    node="here",
    versions={"python": "3.11", "ray": "2.60.0"},
    clock_ahead_s=0.0,
    shared_memory_bytes=1 << 30,
    open_files=65536,
    resources={},
)
NODES = [replace(HERE, node=name, resources={"CPU": 4.0, "memory": 1e9}) for name in "ab"]
CONFIG = load("run: {directory: runs/x}\nworkers: {min: 2, max: 4}\ncluster: {cpus_per_worker: 2}")


def found(nodes: list[NodeFacts], config: RunConfig | None = CONFIG) -> dict[str, Finding]:
    return {finding.about: finding for finding in diagnose(nodes, here=HERE, config=config)}


def test_nothing_is_wrong_with_a_good_cluster() -> None:
    """Advice on what works teaches users to ignore advice."""
    findings = found(NODES)

    assert {finding.level for finding in findings.values()} == {Level.OK}
    assert not any(finding.advice for finding in findings.values())
    assert {"storage", "network", "clocks", "capacity"} < findings.keys()


def test_workers_that_share_a_gpu_are_told_what_that_costs() -> None:
    """Their steps take as long as all of theirs together, and nothing else says so."""
    text = "run: {directory: runs/x}\nworkers: {max: 4}\ncluster: {gpus_per_worker: 0.25}"

    assert "up to 4 workers share a GPU" in found(NODES, load(text))["sharing"].message
    assert "sharing" not in found(NODES)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", ""),
        ("GLOO_SOCKET_IFNAME", "eth0,lo", ""),
        (
            "GLOO_SOCKET_IFNAME",
            "eth",
            "has eth, which is not an interface; there are lo",
        ),
        ("GLOO_SOCKET_IFNAME", "^lo,docker", "has ^lo, and Gloo takes whole names"),
        ("NCCL_SOCKET_IFNAME", "eth,ib", ""),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", ""),
        ("NCCL_SOCKET_IFNAME", "=eth0", ""),
        ("NCCL_SOCKET_IFNAME", "=eth", "leaves no interface"),
        ("NCCL_SOCKET_IFNAME", "ib", "leaves no interface"),
        ("NCCL_SOCKET_IFNAME", "^lo,eth,docker", "leaves no interface"),
        ("NCCL_SOCKET_IFNAME", "^=lo", ""),
    ],
)
def test_a_variable_that_names_no_interface_is_reported(name: str, value: str, said: str) -> None:
    """The workers die when they meet, and their words are of torch."""
    problem = interface_problem({name: value}, ["lo", "eth0", "docker0"])

    assert said in problem
    assert bool(said) == bool(problem)


@pytest.mark.parametrize(
    ("about", "level", "wrong", "said"),
    [
        ("versions", Level.FAIL, {"versions": {"python": "3.10"}}, "ray is missing (here 2.60.0)"),
        ("versions", Level.FAIL, {"versions": {"python": "3.10"}}, "python 3.10 (here 3.11)"),
        ("storage", Level.FAIL, {"storage_problem": "sees nothing"}, "b: sees nothing"),
        ("network", Level.FAIL, {"unreachable": ("a",)}, "b: cannot connect to a"),
        ("shared memory", Level.WARN, {"shared_memory_bytes": 5 << 20}, "b: 5 MiB are free"),
        ("open files", Level.WARN, {"open_files": 1024}, "b: 1024 a process"),
        (
            "interfaces",
            Level.FAIL,
            {"interface_problem": "there is no eth7"},
            "b: there is no eth7",
        ),
        ("clocks", Level.WARN, {"clock_ahead_s": -3.0}, "b: -3.0 s"),
        ("notices", Level.WARN, {"unheard": ("aws does not answer",)}, "b: aws does not answer"),
        (
            "copies",
            Level.WARN,
            {"copies_past_caches": False},
            "b: large copies go through the caches",
        ),
    ],
)
def test_a_node_with_a_problem_is_named_and_no_other(
    about: str, level: Level, wrong: dict[str, Any], said: str
) -> None:
    """One of a thousand nodes has an old image; the user has to learn which."""
    findings = found([NODES[0], replace(NODES[1], **wrong)])

    bad = [finding for finding in findings.values() if finding.level is not Level.OK]
    assert [(finding.about, finding.level) for finding in bad] == [(about, level)]
    assert said in bad[0].message
    assert not bad[0].message.startswith("a:")
    assert bad[0].advice


@pytest.mark.parametrize(
    ("cpus", "level", "said"),
    [
        ([3.0, 5.0], Level.WARN, "3 of workers.max=4 fit now"),
        ([1.0, 1.9], Level.WARN, "0 of workers.max=4 fit now"),
        ([4.0, 4.0], Level.OK, "all of workers.max=4 fit now"),
    ],
)
def test_workers_are_counted_node_by_node(cpus: list[float], level: Level, said: str) -> None:
    """Two halves on two nodes are no place for a worker."""
    nodes = [
        replace(node, resources={"CPU": amount}) for node, amount in zip(NODES, cpus, strict=True)
    ]
    finding = found(nodes)["capacity"]

    assert (finding.level, said in finding.message) == (level, True)


def test_a_cluster_without_a_node_for_workers_is_not_said_to_be_fine() -> None:
    """A check of no nodes finds no problem: an autoscaler has brought none yet."""
    head = replace(HERE, node="head", holds_workers=False)

    for nodes in ([], [head]):
        findings = found(nodes)
        assert findings["nodes"].level is Level.WARN
        assert "check again" in findings["nodes"].advice
        assert not {"storage", "network", "clocks"} & findings.keys()
    wrong = replace(head, storage_problem="sees nothing", versions={"python": "3.10"})
    assert found([wrong])["storage"].level is Level.FAIL  # the controller writes there
    assert found([wrong])["versions"].level is Level.FAIL
    assert "nodes" not in found([head, *NODES])


def test_the_command_finds_what_is_wrong_with_a_configuration(tmp_path: Path) -> None:
    """A dry run that leaves something behind, or says "ok" to bad data, is worse than none."""
    path = tmp_path / "run.yaml"
    path.write_text("run: {directory: runs/x}\nworkers: {max: 1}\n")
    directory = tmp_path / "runs"
    directory.mkdir()
    good = [str(path), f"run.directory={directory}"]

    well = CliRunner().invoke(app, ["doctor", *good, "--json"])
    ill = CliRunner().invoke(app, ["doctor", *good, "data.source=/nowhere/*.txt"])

    assert (well.exit_code, json.loads(well.stdout)["ok"]) == (0, True)
    assert not list(directory.iterdir())
    assert ill.exit_code == 1
    assert "fail  data.source: " in ill.stdout


def test_the_command_finds_that_a_port_is_in_use(tmp_path: Path) -> None:
    """The run takes another one without a word to whoever scrapes this one."""
    path = tmp_path / "run.yaml"
    path.write_text("run: {directory: runs/x}\nworkers: {max: 1}\n")
    asked = ["doctor", str(path), f"run.directory={tmp_path}"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = CliRunner().invoke(app, [*asked, f"cluster.metrics_port={port}"])
        free = CliRunner().invoke(app, asked)
    again = CliRunner().invoke(app, [*asked, f"cluster.metrics_port={port}"])

    assert f"warn  cluster.metrics_port: port {port} of" in found.stdout
    assert "Address already in use" in found.stdout
    assert f"sport = :{port}" in found.stdout
    assert "metrics_port" not in free.stdout + again.stdout
    assert found.exit_code == 0  # the run would work


def test_the_command_asks_the_metadata_service_that_the_run_would_ask(tmp_path: Path) -> None:
    """A container that cannot reach it looks like one that is never taken, until it is."""
    path = tmp_path / "run.yaml"
    path.write_text("run: {directory: runs/x}\nworkers: {max: 1}\nnotices: {cloud: aws}\n")
    with serve(tmp_path / "said") as server:
        asked = [str(path), f"run.directory={tmp_path}", f"notices.endpoint={server.endpoint}"]
        there = CliRunner().invoke(app, ["doctor", *asked])
        server.say(AWS_ACTION, "<html>busy</html>")
        strange = CliRunner().invoke(app, ["doctor", *asked])

    assert "notices: the metadata service of aws: answers" in there.stdout
    said = "notices: this machine: the metadata service of aws does not answer: "
    assert f"warn  {said}" in strange.stdout


def test_an_alternative_that_no_type_of_node_can_serve_is_named_with_what_to_do() -> None:
    """It would be asked for, and waited for, in vain."""
    config = load(
        """\
run: {directory: runs/x}
workers: {min: 2, max: 4}
cluster: {address: "10.0.0.1:6379", gpus_per_worker: 1}
capacity:
  - {spot: true}
  - {zone: us-west-2b, resources: {CPU: 4}}
  - {labels: {ray.io/accelerator-type: H100}}
"""
    )
    spot = NodeKind(name="spot", resources={}, labels={"ray.io/market-type": "spot"})
    zone = {"ray.io/availability-zone": "us-west-2b"}
    small = NodeKind(name="small", resources={"CPU": 2.0, "GPU": 1.0}, labels=zone)

    second, third = unserved(config, there=[small], types=[spot])
    assert (second.level, second.about) == (Level.FAIL, "capacity.1")
    assert "CPU 4, GPU 1, ray.io/availability-zone us-west-2b" in second.message
    assert "change capacity.1, or add such a type; it has spot" in second.advice
    assert third.about == "capacity.2"

    # A node that there is serves it whatever the autoscaler may bring.
    large = NodeKind(name="large", resources={"CPU": 8.0, "GPU": 1.0}, labels=zone)
    assert [each.about for each in unserved(config, there=[large], types=[spot])] == ["capacity.2"]
    unknown = unserved(config, there=[], types=None)
    assert {finding.level for finding in unknown} == {Level.WARN}


def test_a_worker_that_fits_nowhere_is_found_without_alternatives() -> None:
    """With a typing error in its processors a run waits as long as for a missing alternative."""
    small = NodeKind(name="small", resources={"CPU": 1.0}, labels={})

    assert unserved(CONFIG, there=[replace(small, resources={"CPU": 2.0})], types=[]) == []
    (finding,) = unserved(CONFIG, there=[small], types=[small])
    assert (finding.level, finding.about) == (Level.FAIL, "cluster")
    assert "no node has CPU 2" in finding.message
    assert "change cluster.cpus_per_worker" in finding.advice
