"""Transformers opens an export, and generates with it as with the model in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from orchestrator.driver import export_run

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra hf is not installed")

NONE = "none"
WORDS = {NONE: 0, "once": 1, "upon": 2}
PROMPT = torch.arange(5).unsqueeze(0)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel(WORDS, unk_token=NONE))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words)


def _exported(run: Path, folder: Path) -> Any:
    export_run(str(run), str(folder), format="huggingface", memory_bytes=64 << 20)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def _generated(model: Any) -> list[int]:
    model.eval()
    found: list[int] = model.generate(PROMPT, max_new_tokens=12, do_sample=False)[0].tolist()
    return found


def test_an_export_of_a_trainer_opens_with_its_tokenizer(tmp_path: Path) -> None:
    from everstep.integrations.transformers import ElasticTrainer
    from tests.support.ports.trainer_elastic import make_trainer

    trainer = make_trainer(ElasticTrainer, str(tmp_path / "run"), max_steps=3, eval_strategy="no")
    trainer.processing_class = _tokenizer()
    # The folder must say so: with transformers' own value another token would follow.
    trainer.model.generation_config.repetition_penalty = 1.7
    # Valid to generate with, and refused by ``save_pretrained``.
    trainer.model.generation_config.temperature = 0.3
    trainer.train()
    opened = _exported(tmp_path / "run", tmp_path / "folder")

    assert type(opened) is type(trainer.model)
    assert _generated(opened) == _generated(trainer.model)
    assert opened.generation_config.repetition_penalty == 1.7
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer("upon once")["input_ids"] == [2, 1]


@pytest.mark.parametrize("has_folder", [False, True], ids=["new", "of a folder"])
def test_an_export_of_a_script_opens(tmp_path: Path, *, has_folder: bool) -> None:
    """With the tokenizer of the folder that its model says it is from, and no code from there."""
    base = tmp_path / "base"
    if has_folder:
        _tokenizer().save_pretrained(base)
        (base / "modeling.py").write_text("raise SystemExit")
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    held: list[dict[str, torch.Tensor]] = []

    def build() -> Any:
        model = transformers.GPT2LMHeadModel(config)
        model.name_or_path = str(base)
        return model

    def train(session: everstep.Session) -> None:
        model = session.model(build)
        session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=1.0))
        tokens = torch.arange(64).reshape(8, 8)
        for _ in session.steps(8):
            session.train_step(
                lambda samples: model(input_ids=tokens[samples], labels=tokens[samples]).loss
            )
        held.append(
            {name: one.detach().full_tensor().clone() for name, one in model.named_parameters()}
        )

    everstep.run(train, directory=str(tmp_path / "run"), steps=2, global_batch=8, micro_batch=4)
    opened = _exported(tmp_path / "run", tmp_path / "folder")

    model = build()
    model.load_state_dict(held[0], strict=False)
    assert _generated(opened) == _generated(model)
    assert (tmp_path / "folder/tokenizer.json").exists() == has_folder
    assert not (tmp_path / "folder/modeling.py").exists()
