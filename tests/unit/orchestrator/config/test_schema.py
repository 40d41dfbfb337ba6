from dataclasses import fields, replace
from pathlib import Path

import pytest

from orchestrator.config import RunConfig, demo_config, load
from orchestrator.errors import ConfigError
from workers.settings import Settings

LEAST = "run: {directory: runs/x}\nworkers: {max: 4}\n"


@pytest.fixture(autouse=True)
def _no_cluster_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def _problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, overrides)
    return list(caught.value.facts["problems"])


def test_the_least_configuration_says_where_and_how_many() -> None:
    """Everything else has a default; a default for these two would be somebody's surprise."""
    config = load(LEAST)

    assert config.workers.max == 4
    assert config.rules().total_steps == config.train.steps
    assert config.rules().snapshot == config.snapshot
    assert config.run.name == "x"


def test_the_demo_is_deterministic_and_has_nodes_to_lose() -> None:
    """It ends with equal weights and kills a node: it needs the mode, and more than one node."""
    config = demo_config("runs/demo: 1/disturbed")

    assert config.train.deterministic
    assert config.cluster.local_nodes >= 2
    assert config.run.directory.endswith("/runs/demo: 1/disturbed")


def test_all_problems_come_at_once_each_with_its_line() -> None:
    """One problem per attempt makes a user start a run ten times to fix ten typing errors."""
    text = """\
run: {directori: runs/x}
workers:
  min: 5
  max: 4
trian: {steps: 3}
train:
  lr: -1
  global_batch: 5
  stpes: 30
checkpoint: {keep: 1}
model: small
"""

    found = _problems(text, "train.warmup_steps=many")

    for expected in (
        "text:1: run.directory: is missing",
        "text:1: run.directori: is not a key; did you mean directory?",
        "text:3: workers.min: 5 is more than workers.max=4",
        "text:5: trian: is not a section; did you mean train?",
        "text:7: train.lr: ",
        "text:8: train.global_batch: 5 is not a multiple of train.micro_batch=2",
        "text:9: train.stpes: is not a key; did you mean steps?",
        "text:10: checkpoint.keep: ",
        "text:11: model: must be a section with keys, not 'small'",
        "command line: train.warmup_steps: must be a valid integer, not 'many'",
    ):
        assert [line for line in found if line.startswith(expected)], (expected, found)
    assert len(found) == 10


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("train.checkpoint_every", "checkpoint.every_steps"),
        ("workers.steps", "train.steps"),
        ("train.every_steps", "checkpoint.every_steps or snapshot.every_steps"),
        ("workers.mx", "max"),
    ],
)
def test_a_key_in_the_wrong_section_names_the_right_one(path: str, meant: str) -> None:
    """The keys of one section are a list of what the user did not mean."""
    found = _problems(LEAST, f"{path}=5")

    assert found == [f"command line: {path}: is not a key; did you mean {meant}?"]


def test_a_broken_key_does_not_hide_problems_of_its_neighbours() -> None:
    """Checks between keys need a whole configuration, which a broken one is not."""
    found = _problems(LEAST + "train: {steps: x, lr: 0}\n")

    assert [line.split(": ")[1] for line in found] == ["train.steps", "train.lr"]


def test_a_key_written_twice_is_a_problem() -> None:
    """YAML keeps the last one without a word; which one was meant is not ours to guess."""
    found = _problems(LEAST + "train:\n  steps: 50\n  lr: 1.0e-3\n  steps: 70\n")

    assert found == ["text:6: train.steps: is written twice; keep one of them"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run: [\n", "text:2: is not YAML"),
        ("- run\n- workers\n", "text: must be a mapping"),
        ("\n", "run: is missing"),
    ],
)
def test_what_is_no_configuration_is_refused_with_a_reason(text: str, problem: str) -> None:
    """An empty file and a list are valid YAML."""
    assert _problems(text)[0].startswith(problem)


@pytest.mark.parametrize("text", ["run: {directory: x}\nworkers: {max: 4\n", "- run\n"])
def test_what_cannot_be_read_is_not_said_to_be_missing(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who has written ``run:`` looks for that, and not for the bracket two lines below."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")

    assert len(_problems(text, "train.steps=3")) == 1


def test_arguments_without_a_script_are_refused() -> None:
    """The built-in training would never see them."""
    (found,) = _problems(LEAST, "run.arguments=['--lr']")

    assert found.startswith("command line: run.arguments: go to run.script, which is not set")


def test_a_missing_file_is_named() -> None:
    """A traceback of the storage layer would be the first thing a new user sees."""
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read .*: local/small"):
        load("nowhere.yaml")


def test_an_example_is_found_by_name_unless_a_file_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user of the wheel has no checkout to copy one from."""
    monkeypatch.chdir(tmp_path)
    assert load("local/small", ["train.steps=30"]).train.steps == 30

    (tmp_path / "local").mkdir()
    (tmp_path / "local/small").write_text(LEAST)
    assert load("local/small").run.directory != load("local/small.yaml").run.directory


@pytest.mark.parametrize("text", ["train.steps", "steps=3", "=3", "train.=3"])
def test_an_override_without_a_path_or_value_is_refused(text: str) -> None:
    """A typing error in an override must not start a run with the default."""
    assert _problems(LEAST, text)[0].startswith(f"command line: {text}: must read")


def test_overrides_win_over_the_file_and_the_last_one_over_the_first() -> None:
    """They are what a user typed a moment ago."""
    config = load(LEAST, ["workers.max=3", "train.lr=1e-4", "workers.max=2", "model.preset=tiny"])

    assert config.workers.max == 2
    assert config.train.lr == 1e-4  # YAML 1.1 reads 1e-4 as text
    assert config.model.preset == "tiny"


@pytest.mark.parametrize("name", ["run #3", "#3", "a 'b' \"c\"", "%20 ü→", "3 # three"])
def test_an_override_has_no_comments(name: str) -> None:
    """Every argument from a shell is meant: ignored, it would silently send a run to another
    directory."""
    config = load(LEAST, [f"run.directory=/runs/{name}", f"run.name={name}"])

    assert config.run.directory == f"/runs/{name}"
    assert config.run.name == name
    assert load(LEAST, ["run.name='run #3'"]).run.name == "run #3"


def test_the_resolved_configuration_reads_back_to_itself() -> None:
    """It is written into the run directory, and the controller gets it as JSON."""
    config = load(LEAST, ["train.betas=[0.8, 0.99]", "data.source=texts/*.txt"])

    assert load(config.to_yaml()) == config
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_workers_get_every_section_that_is_theirs() -> None:
    """If a section is left out, its keys have no effect."""
    config = load(LEAST)
    sections = [one.name for one in fields(Settings) if one.name in RunConfig.model_fields]
    # A copy of a section is another object than its default.
    own = config.model_copy(
        update={name: replace(getattr(config, name)) for name in sections},
    )

    assert len(sections) > len(("run", "snapshot"))
    assert all(getattr(own.settings(), name) is getattr(own, name) for name in sections)


def test_relative_paths_become_absolute_and_urls_stay() -> None:
    """Workers run in other directories than the one the user typed in."""
    arguments = "run.arguments=[--width, '512']"
    local = load(LEAST, ["data.source=texts/*.txt", "run.script=train.py", arguments])
    remote = load(LEAST, ["run.directory=s3://bucket/run", "data.source=s3://bucket/*.txt"])

    assert local.run.directory == str(Path("runs/x").absolute())
    assert local.run.script == str(Path("train.py").absolute())
    assert local.settings().run.arguments == ("--width", "512")
    assert local.data.source == str(Path("texts").absolute() / "*.txt")
    assert remote.run.directory == "s3://bucket/run"
    assert remote.data.source == "s3://bucket/*.txt"
    assert load(LEAST).data.source == "stdlib"


def test_ray_address_is_used_unless_the_user_asks_for_simulated_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``ray job submit`` sets it, and then no second cluster may be started inside the job."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")

    assert load(LEAST).cluster.address == "10.0.0.1:6379"
    assert load(LEAST, ["cluster.address=auto"]).cluster.address == "auto"
    assert load(LEAST, ["cluster.local_nodes=3"]).cluster.address is None


def test_min_workers_that_no_layout_reaches_are_refused() -> None:
    """5 workers in multiples of 3 are 3: a run with min 4 would wait for capacity for ever."""
    found = _problems(
        "run: {directory: x}\nworkers: {min: 4, max: 5}\n"
        "parallel: {dp_replicate: 3, fixed: [dp_replicate]}\n"
    )

    assert len(found) == 1
    assert found[0].startswith("text:2: workers.min: 4 cannot be reached")
    assert "raise workers.max to 6 or lower workers.min to 3" in found[0]


def test_copies_are_refused_in_deterministic_mode_beside_other_problems() -> None:
    """Such a run would end with other bits after each fault, though it was promised the same."""
    text = "run: {directory: x}\nworkers: {min: 4, max: 5}\n"
    text += "parallel: {dp_replicate: 2}\ntrain: {deterministic: true}\n"

    copies, workers = _problems(text.replace("max: 5", "max: 3"))

    assert copies.startswith(
        "text:3: parallel.dp_replicate: train.deterministic fixes the order of sums"
    )
    assert copies.endswith("write parallel.dp_replicate: 1, or train.deterministic: false")
    assert workers == "text:2: workers.min: 4 is more than workers.max=3"
    assert load(text, ["train.deterministic=false"]).parallel.dp_replicate == 2
    assert load(text, ["parallel.dp_replicate=1"]).train.deterministic


def test_sizes_that_tensor_parallelism_cannot_cut_are_named() -> None:
    """A rank has whole heads: the tiny model has two for keys, so three ranks cannot share them."""
    text = "run: {directory: x}\nworkers: {max: 3}\nparallel: {tp: 3}\nmodel: {preset: tiny}\n"

    (found,) = _problems(text, "cluster.local_nodes=1")

    assert found.startswith("text:3: parallel.tp: 3 does not divide model.num_kv_heads=2, ")
    assert load(text.replace("3", "2"), ["cluster.local_nodes=1"]).rules().layout.tp == 2


def test_sequences_that_cannot_be_cut_are_named_with_what_can() -> None:
    text = (
        "run: {directory: x}\nworkers: {max: 6}\nparallel: {cp: 6}\ndata: {sequence_length: 64}\n"
    )

    odd, fixed = _problems(text, "train.deterministic=true")

    assert "parallel.cp: 6 does not divide data.sequence_length=64: write 4" in odd + fixed
    assert "parallel.cp: train.deterministic fixes the order of sums over" in odd + fixed
    cut = load(text, ["parallel.cp=2", "train.deterministic=false"])
    assert str(cut.rules().layout) == "parallel.cp=2"


def test_a_full_size_that_its_layout_does_not_fit_is_refused() -> None:
    """The planner would never reach it, and train less than it was asked for in silence."""
    text = "run: {directory: x}\nworkers: {max: 4}\nparallel: {tp: 4, pp: 2}\n"
    few, wide = _problems(text, "run.script=train.py")

    assert few.endswith(
        "workers.max: 4 is too few for parallel.pp=2 x parallel.tp=4: raise it to 8, or lower a "
        "degree"
    )
    assert "parallel.tp: 4 is more than the 2 workers that cluster.local_nodes=2 leaves" in wide


def test_experts_that_the_full_size_cannot_cut_are_refused() -> None:
    """Workers would find no experts, and the planner would never reach what is asked for."""
    text = "run: {directory: x}\nworkers: {max: 6}\nparallel: {ep: 4}\nmodel: {preset: tiny}\n"
    bits = "train.deterministic=true"

    uneven, none = _problems(text)
    (ordered,) = _problems(text, "workers.max=8", "run.script=train.py", bits)
    (few,) = _problems(text, "workers.max=3", "run.script=train.py")

    assert uneven.endswith(
        "parallel.ep: 4 does not divide the 6 shards of workers.max=6: write 2, or make "
        "workers.max a multiple of 4"
    )
    assert none.endswith("model.preset=tiny has no experts: write parallel.ep: 1")
    assert ordered.startswith("text:3: parallel.ep: train.deterministic fixes the order of sums")
    assert few.endswith("3 is too few for parallel.ep=4: raise it to 4, or lower a degree")
    assert load(text, ["workers.max=8", "run.script=train.py"]).rules().layout.ep == 4


def test_stages_that_cannot_be_made_or_fed_are_refused() -> None:
    """Each worker of a stage would find out alone, after the model was built."""
    text = (
        "run: {directory: x}\nworkers: {max: 12}\nparallel: {pp: 3}\n"
        "model: {preset: tiny}\ntrain: {global_batch: 8, micro_batch: 1}\n"
    )

    found = _problems(text)

    fed, cut, tied = (line.partition("parallel.pp: ")[2] for line in found)
    assert fed.startswith(
        "3 stages need as many micro-batches each; with workers.max=12 there are 2"
    )
    assert cut == "3 is more than model.num_layers=2"
    assert tied.endswith("write model.tied: false, or parallel.pp: 1")
    fitting = ["parallel.pp=2", "model.tied=false", "workers.max=8"]
    assert str(load(text, fitting).rules().layout) == "parallel.pp=2"


def test_more_stages_than_layers_are_refused_with_how_many_a_worker_may_have() -> None:
    text = (
        "run: {directory: x}\nworkers: {max: 4}\nparallel: {pp: 2, stages_per_worker: 3}\n"
        "model: {preset: tiny, num_layers: 4, tied: false}\n"
    )

    (found,) = _problems(text)

    assert found.endswith(
        "parallel.stages_per_worker: 3 with parallel.pp=2 is more stages than model.num_layers=4: "
        "at most 2"
    )
    fitting = load(text, ["parallel.stages_per_worker=2"])
    assert fitting.rules().layout.stages_per_worker == 2
    (found,) = _problems(text, "parallel.pp=1")
    assert found.endswith("stages_per_worker: 3 stages need parallel.pp above 1; else write 1")


def test_patience_scales_every_bound_and_keeps_their_order() -> None:
    """One knob: a bound that it forgets would fire before the one it depends on."""
    usual, slow = load(LEAST).rules().bounds, load(LEAST, ["recovery.patience=9"]).rules().bounds

    for name in ("grace_s", "start_s", "form_s", "fence_s", "kill_s", "read_s", "yield_s"):
        assert getattr(slow, name) == pytest.approx(3 * getattr(usual, name)), name


@pytest.mark.parametrize(
    ("snapshots", "checkpoints", "every"),
    [(1, 10, 1), (5, 10, 1), (0, 10, 10), ("auto", 10, 1), (0, "auto", 1)],
)
def test_what_may_be_committed_follows_from_both_tiers(
    snapshots: int | str, checkpoints: int | str, every: int
) -> None:
    """An interval is no bound where ranks leave their last step in memory, whichever it is."""
    settings = [f"snapshot.every_steps={snapshots}", f"checkpoint.every_steps={checkpoints}"]

    assert load(LEAST, settings).rules().checkpoint_every == every


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("1.5", "must be a number of steps or auto, not 1.5"),
        ("often", "must be a number of steps or auto, not 'often'"),
        ("-1", "must be greater than or equal to 0, not -1"),
    ],
)
def test_an_interval_is_a_number_or_auto(value: str, wrong: str) -> None:
    """Two types are allowed; what is of neither must be one problem, not one for each."""
    with pytest.raises(ConfigError) as refused:
        load(LEAST, [f"snapshot.every_steps={value}"])

    assert refused.value.facts["problems"] == [f"command line: snapshot.every_steps: {wrong}"]


def test_an_unknown_cloud_is_refused_with_the_known_ones() -> None:
    """Its notices would be waited for in vain; a command can ask for them."""
    text = "notices: {cloud: oracle, endpoint: 'https://10.0.0.1', file: notice, command: a 'b}\n"

    assert [line.partition(": ")[2] for line in _problems(LEAST + text)] == [
        (
            "notices.cloud: 'oracle' is none of auto, aws, gcp, azure, none; "
            "for another cloud set notices.command"
        ),
        "notices.endpoint: must be like http://169.254.169.254, not 'https://10.0.0.1'",
        "notices.file: 'notice' must be an absolute path",
        'notices.command: "a \'b" is not a command: No closing quotation',
    ]


@pytest.mark.parametrize("command", ["   ", '""'])
def test_a_command_for_notices_without_a_program_is_refused(command: str) -> None:
    """No node could have started it, and the run would have heard of no notice."""
    (problem,) = _problems(LEAST + f"notices: {{command: '{command}'}}\n")

    assert "notices.command: " in problem
    assert "names no program" in problem


def test_simulated_nodes_ask_no_cloud_unless_one_is_named() -> None:
    """They are all of one machine, which is whoever's; a cluster's nodes ask their own."""
    watched = [
        load(LEAST, overrides).watched()["cloud"]
        for overrides in ([], ["notices.cloud=aws"], ["cluster.address=auto"])
    ]

    assert watched == ["none", "aws", "auto"]


def test_the_page_of_simulated_nodes_is_for_their_machine_unless_somebody_says_otherwise() -> None:
    """A laptop is in networks of strangers; a cluster's Prometheus is on another machine."""
    local = [
        load(LEAST, overrides).is_page_local
        for overrides in (
            [],
            ["cluster.metrics_host=cluster"],
            ["cluster.address=auto"],
            ["cluster.address=auto", "cluster.metrics_host=loopback"],
        )
    ]

    assert local == [True, False, False, True]
    (problem,) = _problems(LEAST, "cluster.metrics_host=0.0.0.0")
    assert problem.endswith("must be 'auto', 'cluster' or 'loopback', not '0.0.0.0'")


@pytest.mark.parametrize(("workers", "nodes", "cpus"), [(4, 2, 2), (4, 3, 2), (5, 2, 3), (1, 4, 1)])
def test_simulated_nodes_hold_all_workers_but_not_twice(
    workers: int, nodes: int, cpus: int
) -> None:
    """With room to spare the loss of a node would not be felt, and would test nothing."""
    config = load(LEAST, [f"workers.max={workers}", f"cluster.local_nodes={nodes}"])

    assert config.cpus_per_local_node() == cpus


CLUSTER = LEAST + "cluster: {address: auto}\n"


def test_capacity_may_name_alternatives_in_order() -> None:
    """Without it everything is as before: any node with room for a worker."""
    assert [each.selector() for each in load(LEAST).alternatives()] == [{}]
    config = load(
        CLUSTER
        + """\
capacity:
  - {spot: true, zone: us-west-2a, usd_per_hour: 0.4}
  - spot: false
    resources: {CPU: 2, memory: 1000000}
    labels: {team: red}
    usd_per_hour: 0
"""
    )

    first, second = config.alternatives()
    assert first.resources == {"CPU": 1.0}
    assert first.selector() == {
        "ray.io/availability-zone": "us-west-2a",
        "ray.io/market-type": "spot",
    }
    assert second.resources == {"CPU": 2.0, "memory": 1e6}
    assert second.selector() == {"team": "red", "ray.io/market-type": "on-demand"}
    assert config.rules().capacity.usd_per_hour == (0.4, 0.0)
    assert config.alternative_names() == ["0 us-west-2a spot", "1 red on-demand"]
    assert load(config.to_yaml()) == config


@pytest.mark.parametrize(
    ("line", "path", "said"),
    [
        ("[{usd_per_hour: -1}]", "capacity.0.usd_per_hour", "greater than or equal to 0"),
        ("[{spot: true}, {zones: a}]", "capacity.1.zones", "did you mean zone?"),
        ("[{resources: {CPU: 0}}]", "capacity.0.resources.CPU", "greater than 0"),
        ("[{resources: {GPU: 2}}]", "capacity.0.resources.GPU", "cluster.gpus_per_worker=0"),
        ("{spot: true}", "capacity", "must be a list"),
        ("[{usd_per_hour: 2}, {spot: true}]", "capacity.1.usd_per_hour", "is missing"),
    ],
)
def test_what_is_wrong_with_an_alternative_is_named(line: str, path: str, said: str) -> None:
    """A price below zero would make a run cheaper the longer it takes."""
    (problem,) = _problems(CLUSTER + f"capacity: {line}\n")

    assert f"{path}: " in problem
    assert said in problem


def test_simulated_nodes_have_prices_and_no_markets() -> None:
    """They would wait for a spot node for ever."""
    assert load(LEAST + "capacity: [{usd_per_hour: 2}]").capacity[0].usd_per_hour == 2.0
    (problem,) = _problems(LEAST, "capacity=[{spot: true}]")
    assert "name a cluster by cluster.address" in problem


def test_where_the_curve_goes_is_checked_by_name() -> None:
    """A key of a section in a section is looked for there, and a missing one has an example."""
    text = "logging: {tensorboard: [x], wandb: {projct: p}, mlflow: {tracking_uri: x}}\n"

    assert [line.partition(": ")[2] for line in _problems(LEAST + text)] == [
        "logging.tensorboard: must be true or a directory, not ['x']",
        "logging.wandb.project: is missing; write for example project: my-models",
        "logging.wandb.projct: is not a key; did you mean project?",
        "logging.mlflow.experiment: is missing; write for example experiment: my-models",
    ]


def test_a_topology_that_contradicts_itself_is_refused() -> None:
    """A node is in one rack, and zones have racks that there are."""
    with pytest.raises(ConfigError) as refusal:
        load("local/small", ["topology.racks={a: [n1], b: [n2, n1]}", "topology.zones={z: [c]}"])

    told = str(refusal.value)
    assert "topology.racks: node n1 is named twice: name it once" in told
    assert "topology.zones: c is not a rack; topology.racks names a, b" in told


def test_every_problem_of_a_list_is_reported() -> None:
    """The first one drops the whole list; the second looked for it there."""
    found = _problems(CLUSTER + "capacity: [{usd_per_hour: -1}, {zones: a}]\n")

    assert [line.split(": ")[1] for line in found] == [
        "capacity.0.usd_per_hour",
        "capacity.1.zones",
    ]
