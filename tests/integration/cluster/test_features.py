"""Features of README and GUIDE, as a reader runs them: on nodes, with a script, with a kill.

The table in ``tests/README.md`` says which test has which feature; one run carries many of them.
"""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

import ucp_core
from orchestrator.config import RunConfig, load
from orchestrator.driver import export_run
from orchestrator.driver.faults import signal_rank
from orchestrator.driver.launch import Launched
from tests.support import train_adapters
from tests.support.forking import run_script
from tests.support.history import read_history
from tests.support.logged import in_tensorboard
from tests.support.reach import reach
from tests.support.run_command import everstep
from workers.data import DataOrder, open_texts

pytestmark = pytest.mark.timeout(600)

SUPPORT = Path(__file__).parents[2] / "support"
#: Float32 sums of another order differ by so much after some hundred steps.
TOLERANCE = 2e-5
MEMORY = 64 << 20
#: A run whose end is compared has so many, and takes some seconds.
NUM_STEPS = 150


def _through_a_kill(run: Launched, *, workers: int, after: int = 5) -> None:
    """Kill a worker, and wait until as many train again.

    A standby takes its place; if none is ready, the run goes on without it and grows again.
    """
    before = reach(run, after, workers=workers)
    signal_rank(run, 1, signal.SIGKILL)
    reach(run, before["step"] + 3, workers=workers, attempt=before["attempt"] + 1)


def _stopped(run: Launched) -> int:
    """Stop a run, check what it wrote, and return its last step."""
    run.stop("all is seen")
    summary = run.follow(lambda _: None)
    assert summary["outcome"] == "stopped", summary["reason"]
    kinds = {incident["kind"] for incident in summary["incidents"]}
    assert {"crash"} <= kinds <= {"crash", "growth", "stop", "resume"}
    read_history(run.config.run.directory).check_exactly_once(run.config, summary["steps"])
    return int(summary["steps"])


def _losses(directory: str) -> list[float]:
    return [line["loss"] for line in read_history(directory).committed()]


def _micro_batches(num_samples: int, config: RunConfig) -> Iterator[list[list[int]]]:
    """Yield for each step the samples of its micro-batches."""
    train = config.train
    order = DataOrder(seed=0, num_samples=num_samples, global_batch=train.global_batch)
    start = 0
    while True:
        samples = order.at(np.arange(start, start + train.global_batch)).tolist()
        each = train.micro_batch
        yield [samples[at : at + each] for at in range(0, len(samples), each)]
        start += train.global_batch


def _save_base(folder: Path, **more: Any) -> Any:
    """Save a tiny model as from the hub, in bfloat16 and several files; return it."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    torch.manual_seed(3)
    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, **more,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def _load_by_transformers(folder: Path | str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def _train_adapters(
    base: Any, arguments: list[str], config: RunConfig, num_steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Do in plain torch what ``train_adapters`` does; return its losses and weights."""
    folder, documents, index = arguments
    rows = train_adapters.rows_of(documents, index)
    torch.manual_seed(config.train.seed)
    model = train_adapters.build_model(folder)
    names = {
        name: name.removeprefix("base_model.model.").replace(".base_layer", "")
        for name, _ in model.named_parameters()
    }
    named = {names[name]: value for name, value in model.named_parameters()}
    with torch.no_grad():
        for name, value in base.named_parameters():
            named[name].copy_(value)
    optimizer = train_adapters.build_optimizer(named)
    scheduler = LambdaLR(optimizer, train_adapters.lr_factor)
    losses = []
    for _, batches in zip(range(num_steps), _micro_batches(len(rows), config), strict=False):
        parts = [
            train_adapters.loss_of(model, train_adapters.collated(rows, batch)) for batch in batches
        ]
        loss = sum((one * num for one, num in parts), torch.zeros(())) / sum(n for _, n in parts)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in named.items()}


@pytest.mark.chaos
def test_adapters_on_a_base_of_the_hub(
    begin_endless: Callable[..., Launched], tmp_path: Path
) -> None:
    """As they train in plain torch and peft; who joins later builds and reads the base, too."""
    pytest.importorskip("peft", reason="peft is not installed")
    base = _save_base(tmp_path / "base")
    (tmp_path / "data").mkdir()
    with (tmp_path / "data/documents.jsonl").open("w") as file:
        for number in range(200):
            tokens = [(number + at) % 16 for at in range(5 + number % 30)]
            file.write(json.dumps({"input_ids": tokens}) + "\n")
    arguments = [str(tmp_path / name) for name in ("base", "data/*.jsonl", "index")]
    run = begin_endless(
        run__script=SUPPORT / "train_adapters.py",
        run__arguments=json.dumps(arguments),
        run__init_from=tmp_path / "base",
        run__init_missing='["*.lora_*"]',
        workers__max=2,
        workers__standby_per_node=0,
        train__global_batch=8,
        logging__tensorboard=True,
    )
    directory = run.config.run.directory

    _through_a_kill(run, workers=2)
    exported = export_run(
        directory, str(tmp_path / "early"), format="huggingface", memory_bytes=MEMORY
    )
    num_steps = _stopped(run)
    export_run(directory, str(tmp_path / "last"), format="huggingface", memory_bytes=MEMORY)

    losses, weights = _train_adapters(base, arguments, run.config, num_steps)
    assert _losses(directory) == pytest.approx(losses, abs=TOLERANCE)
    found = load_file(tmp_path / "last/model.safetensors")
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, atol=TOLERANCE, rtol=0, msg=name)
    tuned = _load_by_transformers(tmp_path / "last")
    adapters = {n: v for n, v in tuned.state_dict().items() if ".lora_" in n}
    assert len(adapters) == sum(".lora_" in name for name in weights)
    for name, value in adapters.items():
        torch.testing.assert_close(value, weights[name], atol=TOLERANCE, rtol=0, msg=name)
    assert 0 < exported["step"] <= num_steps
    curve = in_tensorboard(Path(directory, "tensorboard"))
    assert [step for step, _ in curve["train/loss"]] == list(range(1, num_steps + 1))
    assert len(curve["average"]) == num_steps


@pytest.mark.chaos
def test_a_stream_with_nearly_everything_goes_on_from_a_script_that_ran_alone(
    begin_endless: Callable[..., Launched], tmp_path: Path
) -> None:
    """Bit for bit as alone. It ran in the directory before: the run goes on where it ended."""
    arrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    from pyarrow import parquet

    numbers = torch.Generator().manual_seed(1)
    for part in range(2):
        columns = {name: torch.randn(50, generator=numbers).numpy() for name in "xy"}
        parquet.write_table(arrow.table(columns), tmp_path / f"part{part}.parquet")
    files = f"{tmp_path}/part*.parquet"
    script = SUPPORT / "train_streamed.py"

    calm, directory = tmp_path / "calm", tmp_path / "run"
    run_script(script, tmp_path, files, str(calm), str(NUM_STEPS))
    # Its output if it ends after ten steps.
    name = "checkpoints/step-{:08d}"
    shutil.copytree(calm / name.format(10), directory / name.format(10))
    (directory / "metrics").mkdir()
    lines = (calm / "metrics/rank0.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics/rank0.jsonl").write_text("".join(lines[:10]))

    run = begin_endless(
        run__script=script,
        run__arguments=json.dumps([files]),
        workers__max=2,
        workers__standby_per_node=0,
        train__steps=NUM_STEPS,
        train__global_batch=8,
        train__warmup_steps=0,
        train__schedule="constant",
    )
    reach(run, 15, workers=2)
    signal_rank(run, 1, signal.SIGKILL)
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "completed", summary["reason"]
    kinds = [incident["kind"] for incident in summary["incidents"]]
    assert kinds[:2] == ["resume", "crash"]
    read_history(str(directory)).check_exactly_once(run.config)
    assert _losses(str(directory)) == _losses(str(calm))
    last = name.format(NUM_STEPS)
    report = ucp_core.diff(ucp_core.open(directory / last), ucp_core.open(calm / last))
    assert report.equal, report


def test_a_model_of_the_hub_is_tuned_by_the_command_and_exported(
    nodes: Any, tmp_path: Path
) -> None:
    """As README and GUIDE say it, to a folder that transformers opens: it has the loss we told.

    By the model's own plan two workers of a node have a half of each matrix. One has all of it,
    until the killed one is replaced.
    """
    tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    base, directory, out = tmp_path / "base", str(tmp_path / "run"), str(tmp_path / "tuned")
    _save_base(base, vocab_size=600, tie_word_embeddings=True)
    vocabulary = {"<unk>": 0, "</s>": 1} | {f"w{n}": n for n in range(2, 600)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(base / "tokenizer.json"))
    for number in range(40):
        text = " ".join(f"w{(number + at * 7) % 590 + 2}" for at in range(300))
        (tmp_path / f"{number}.txt").write_text(text)
    settings = {
        "run.directory": directory, "run.init_from": base, "model.preset": f"hf:{base}",
        "data.tokenizer": base / "tokenizer.json", "data.source": f"{tmp_path}/*.txt",
        "data.sequence_length": 16, "data.cache_directory": tmp_path / "cache",
        "workers.max": 2, "workers.standby_per_node": 0, "parallel.tp": 2,
        "train.steps": 100_000, "train.validation_every": 10,
        "cluster.address": nodes.address,
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in settings.items()]

    begun = everstep("run", "local/small", *words, "--detach")
    assert begun.returncode == 0, begun.stderr
    config = load(Path(directory, "config.yaml").read_text())
    run = Launched(config, None, attach=True)
    _through_a_kill(run, workers=2, after=12)
    exported = everstep("export", directory, "--to", out, "--format", "huggingface", "--json")
    _stopped(run)

    assert exported.returncode == 0, exported.stderr
    layouts = [line["layout"] for line in read_history(directory).committed()]
    assert layouts[0] == layouts[-1] == "tp=2"
    lines = Path(directory, "metrics/validation.jsonl").read_text().splitlines()
    told = {line["step"]: line["loss"] for line in map(json.loads, lines)}
    model = _load_by_transformers(out)
    assert model.dtype == torch.float32
    held_out = open_texts(config.data).held_out
    numbers = range(min(config.data.validation_samples, held_out.num_samples) // 2 * 2)
    inputs, targets = map(torch.from_numpy, held_out.batch(numbers))
    loss = cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
    assert float(loss.detach()) == pytest.approx(
        told[json.loads(exported.stdout)["step"]], abs=TOLERANCE
    )
