import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from workers.data import open_texts
from workers.data.tokens import BYTE_END
from workers.errors import DataError
from workers.settings import DataSettings


def write_texts(directory: Path, num_files: int = 30) -> DataSettings:
    (directory / "text").mkdir()
    for number in range(num_files):
        (directory / f"text/{number:02d}.txt").write_text(f"{number:02d}" * 50)
    return DataSettings(
        source=f"{directory}/text/*.txt",
        sequence_length=8,
        validation_share=0.3,
        cache_directory=str(directory / "cache"),
    )


def test_targets_are_the_inputs_moved_by_one(tmp_path: Path) -> None:
    """Samples overlap by one token: without it the last token of each would never be predicted."""
    train = open_texts(write_texts(tmp_path)).train

    inputs, targets = train.batch(range(train.num_samples))

    flat = np.asarray(train.tokens[: inputs.size + 1], np.int64)
    assert np.array_equal(inputs.reshape(-1), flat[:-1])
    assert np.array_equal(targets.reshape(-1), flat[1:])


def test_a_document_is_in_one_split_only(tmp_path: Path) -> None:
    """Held-out text that was trained on would make the validation loss worthless."""
    texts = open_texts(write_texts(tmp_path))

    def documents(tokens: np.ndarray) -> set[bytes]:
        ends = np.flatnonzero(tokens == BYTE_END)
        parts = np.split(tokens, ends + 1)
        return {part[:-1].astype(np.uint8).tobytes() for part in parts if len(part)}

    train, held_out = documents(texts.train.tokens), documents(texts.held_out.tokens)
    assert train
    assert held_out
    assert not train & held_out
    assert len(train | held_out) == 30


def test_the_same_text_elsewhere_is_the_same_data(tmp_path: Path) -> None:
    """Nodes keep the files in different places; names below the glob decide, not the path."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "c").mkdir(parents=True)

    first = open_texts(write_texts(tmp_path / "a"))
    second = open_texts(write_texts(tmp_path / "b" / "c"))

    assert first.digest == second.digest


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """Tokens are cached on disk and in the process."""
    settings = write_texts(tmp_path)
    before = open_texts(settings).digest
    (tmp_path / "text/03.txt").write_text("something else " * 20)
    open_texts.cache_clear()

    assert open_texts(settings).digest != before


def test_json_lines_are_documents_of_their_own(tmp_path: Path) -> None:
    """One file would otherwise be one document, wholly in one split."""
    lines = [json.dumps({"body": f"line {number} " * 5}) for number in range(40)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines) + "\n\n")
    settings = DataSettings(
        source=f"{tmp_path}/all.jsonl",
        text_field="body",
        sequence_length=8,
        validation_share=0.3,
        cache_directory=str(tmp_path / "cache"),
    )

    texts = open_texts(settings)

    assert np.count_nonzero(texts.train.tokens == BYTE_END) > 10
    assert np.count_nonzero(texts.held_out.tokens == BYTE_END) > 3


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    """The user has to find it among millions."""
    (tmp_path / "all.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    settings = DataSettings(source=f"{tmp_path}/all.jsonl", cache_directory=str(tmp_path))

    with pytest.raises(DataError, match=r"all\.jsonl line 2: 'text' is int, not text"):
        open_texts(settings)


def test_text_behind_a_url_is_read_through_the_store(tmp_path: Path) -> None:
    """The same glob, but listed and read by other code than local files."""
    local = write_texts(tmp_path)
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    for file in (tmp_path / "text").iterdir():
        files.pipe(f"/texts/{file.name}", file.read_bytes())

    texts = open_texts(replace(local, source="memory://texts/*.txt"))

    assert texts.digest == open_texts(local).digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "/nowhere/*.txt"}, "matches no file"),
        ({"sequence_length": 100_000}, "less than one sample"),
        ({"validation_share": 1e-9}, "tokens for validation"),
        ({"tokenizer": "/nowhere/tokenizer.json"}, "data.tokenizer: /nowhere/tokenizer.json"),
    ],
    ids=["no file", "too little", "nothing held out", "no tokenizer"],
)
def test_data_that_cannot_be_used_is_one_clear_error(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    """Each of them would otherwise surface as an index error in the first step."""
    settings = replace(write_texts(tmp_path), **change)  # type: ignore[arg-type]

    with pytest.raises(DataError, match=message):
        open_texts(settings)


def test_the_standard_library_is_enough_to_train_on(tmp_path: Path) -> None:
    """It is the default, on machines without a network: it has to be there and be large."""
    texts = open_texts(DataSettings(cache_directory=str(tmp_path)))

    assert texts.train.num_samples > 20_000
    assert texts.held_out.num_samples > 64
