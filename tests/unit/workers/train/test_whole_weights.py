"""``session.save`` alone: the file is what ``torch.save(model.state_dict())`` would have held."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from everstep import Session, TaskError, run
from ucp_core import open as open_any

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)


class Tied(nn.Module):
    """A model with a shared weight, a scalar, a buffer, and a frozen weight in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.last = nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(2)
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)))
        return y


def test_it_loads_into_the_plain_model_with_the_same_results(tmp_path: Path) -> None:
    """Strictly: every name of ``state_dict`` is there, and no other."""
    seen: list[Tensor] = []

    def task(session: Session) -> None:
        model = session.model(Tied, average_buffers=["*.running_mean", "*.running_var"])
        trained = lambda named: [one for one in named.values() if one.requires_grad]  # noqa: E731
        session.optimizer(lambda named: torch.optim.AdamW(trained(named)))
        for step in session.steps(len(INPUTS)):
            session.train_step(lambda indices: model(INPUTS[indices]).square().mean())
            if step.number in (2, 4):
                path = session.save("best")
                assert path == f"{tmp_path}/saved/best/model.safetensors"
                model.eval()
                with torch.no_grad():
                    seen.append(model(INPUTS))
                model.train()

    run(task, directory=str(tmp_path), steps=5, global_batch=4, micro_batch=2)

    file = tmp_path / "saved/best/model.safetensors"
    plain = Tied()
    plain.load_state_dict(load_file(file), strict=True)
    plain.eval()
    assert torch.allclose(plain(INPUTS), seen[1], atol=1e-6)
    assert not torch.allclose(seen[0], seen[1], atol=1e-4)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "4", "attempt": "1"}
    # It is a checkpoint as any other: `ucp` and `init_from` open the folder.
    assert "last.bias" in {key.fqn for key in open_any(str(file.parent)).state_map.entries}


@pytest.mark.parametrize("name", ["", "../best", "a/b", ".hidden", "a b"])
def test_a_name_leads_out_of_no_folder(tmp_path: Path, name: str) -> None:
    """It becomes a folder of the run directory."""

    def task(session: Session) -> None:
        model: Any = session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))
        for _ in session.steps(len(INPUTS)):
            session.train_step(lambda indices: model(INPUTS[indices]).square().mean())
            session.save(name)

    with pytest.raises(TaskError, match=r"session\.save: .* must be of letters"):
        run(task, directory=str(tmp_path), steps=2, global_batch=4, micro_batch=2)
