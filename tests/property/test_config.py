from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.config import RunConfig, load
from orchestrator.errors import ConfigError

SECTIONS = [*RunConfig.model_fields, "trian"]
KEYS = [
    "directory", "name", "max", "min", "steps", "lr", "betas", "global_batch", "micro_batch",
    "preset", "dim", "num_heads", "source", "keep", "patience", "dp_replicate", "address",
    "local_nodes", "warmup_steps", "vocab_size", "schedule", "stpes",
]  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-3, max_value=10**6)
    | st.floats()
    | st.sampled_from(["", "small", "8b", "cosine", "runs/x", "\u00e4 b: c"])
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.sampled_from(KEYS), SCALARS)
DOCUMENTS = st.dictionaries(
    st.sampled_from(SECTIONS),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4) | VALUES,
    max_size=5,
)
GOOD = {"run": {"directory": "runs/x"}, "workers": {"max": 4}}


@given(document=DOCUMENTS, complete=st.booleans())
@example(document={"train": {"micro_batch": 0}}, complete=True)
@settings(max_examples=3 * settings().max_examples, deadline=None)
def test_any_document_is_a_configuration_or_a_list_of_problems(
    document: dict[str, Any], *, complete: bool
) -> None:
    """Checks between keys run on documents that are half wrong, where a check may trip itself."""
    text = yaml.safe_dump({**GOOD, **document} if complete else document) + "\n"

    config, problems = _loaded(text)

    assert (config is None) == bool(problems)
    if config is not None:
        assert load(config.to_yaml()) == config
        assert config.rules().max_workers == config.workers.max


@given(text=st.text(alphabet="ab:{}[]-&*#'\"!%|>\n ", max_size=40))
@settings(max_examples=3 * settings().max_examples, deadline=None)
def test_any_text_is_refused_with_problems(text: str) -> None:
    """YAML has more syntax than anybody uses: anchors, tags, directives, flow and block."""
    config, problems = _loaded(text + "\n")

    assert config is None
    assert problems


def _loaded(text: str) -> tuple[RunConfig | None, list[str]]:
    try:
        return load(text), []
    except ConfigError as error:
        return None, error.facts["problems"]
