"""JSON lines and Parquet rows: any sample by its number, wherever the files are."""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everstep import DataError, DataLoader, JsonLines, ParquetRows, pack
from tests.support.object_servers import s3_server, use_s3
from ucp_core.storage import open_store
from workers.data import DataOrder, lines, open_texts
from workers.data.files import DataFile
from workers.data.packing import PackedRows
from workers.settings import DataSettings


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline="")
        return str(path)

    return write


def opened(paths: Any, tmp_path: Path) -> JsonLines:
    return JsonLines(paths, cache=str(tmp_path / "cache"))


def test_lines_of_all_files_in_their_order(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty lines, other ends of lines, no last end, one digit; however the file is cut to read."""
    monkeypatch.setattr(lines, "_CHUNK_BYTES", 3)
    write("data/b.jsonl", '{"n": 2}\r\n\r\n\n{"n": 3}\n')
    write("data/a.jsonl", '\n{"n": 0}\n1')
    write("data/c.jsonl", "")
    found = opened(f"{tmp_path}/data/*.jsonl", tmp_path)

    assert [found[at] for at in range(len(found))] == [{"n": 0}, 1, {"n": 2}, {"n": 3}]
    assert found[-1] == {"n": 3}
    with pytest.raises(IndexError):
        found[4]


def test_the_index_is_made_once_and_again_for_other_files(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("a.jsonl", "".join(f"{n}\n" for n in range(10, 30)))
    first = opened(path, tmp_path)
    read: list[int] = []
    real = DataFile.read

    def counted(file: DataFile, at: int, size: int) -> bytes:
        read.append(size)
        return real(file, at, size)

    monkeypatch.setattr(DataFile, "read", counted)

    again = opened(path, tmp_path)
    assert read == []
    assert again[7] == 17
    assert read == [3]
    write("a.jsonl", "".join(f"{n}\n" for n in range(10, 40)))
    other = opened(path, tmp_path)
    assert (len(first), len(again), len(other)) == (20, 20, 30)
    assert first.digest == again.digest != other.digest


def test_a_file_replaced_by_one_as_long_and_as_old_is_another_one(
    write: Callable[..., str], tmp_path: Path
) -> None:
    """``cp -p`` keeps the time; size and time alone left the index of the old lines."""
    path = write("a.jsonl", "[10]\n[2]\n")
    times = Path(path).stat()
    first = opened(path, tmp_path)
    write("a.jsonl", "[1]\n[20]\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    other = opened(path, tmp_path)

    assert (other[0], other[1]) == ([1], [20])
    assert first.digest != other.digest


def test_the_same_lines_elsewhere_are_the_same_data(
    write: Callable[..., str], tmp_path: Path
) -> None:
    """Each node may have a copy, with a time and an inode of its own."""
    paths = [write(f"{node}/a.jsonl", "[1]\n[2]\n") for node in ("x", "y")]
    store, path = open_store("memory://copy/a.jsonl")
    store.write_atomic(path, Path(paths[0]).read_bytes(), fsync=False)

    digests = {opened(one, tmp_path).digest for one in (*paths, "memory://copy/a.jsonl")}
    assert len(digests) == 1


@pytest.mark.parametrize("place", ["local", "s3"])
def test_an_object_replaced_by_one_of_its_size_is_other_data(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens stayed those of the old object, and a message blamed the new one."""
    arrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    from pyarrow import parquet

    with ExitStack() as stack:
        root = str(tmp_path)
        if place == "s3":
            pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'everstep[s3]'")
            use_s3(monkeypatch, stack.enter_context(s3_server(tmp_path / "log")))
            root = "s3://replaced/data"
            open_store(root)[0].service.mkdir("replaced")  # type: ignore[attr-defined]

        def put(name: str, data: bytes) -> str:
            store, path = open_store(f"{root}/{name}")
            store.write_atomic(path, data, fsync=False)
            return f"{root}/{name}"

        seen = []
        for tokens, shift, text in (([1, 2, 3], 0, b"a"), ([7654321], 1000, b"b")):
            line = json.dumps({"input_ids": tokens}).encode() + b"\n"
            assert len(line) == 25
            found = JsonLines(put("p.jsonl", line * 40), cache=str(tmp_path / "i"))
            packed = pack(found, 16, cache=tmp_path / "i")
            file = io.BytesIO()
            rows = arrow.table({"a": arrow.array(range(shift, shift + 50), arrow.int64())})
            parquet.write_table(
                rows, file, compression="none", use_dictionary=False, write_statistics=False
            )
            opened_rows = ParquetRows(put("r.parquet", file.getvalue()))
            for number in range(12):
                put(f"{number}.txt", text * 400)
            open_texts.cache_clear()
            texts = open_texts(
                DataSettings(
                    source=f"{root}/*.txt", sequence_length=32, cache_directory=f"{tmp_path}/i"
                )
            )
            assert isinstance(packed, PackedRows)
            opened_ = (len(packed), packed[0]["input_ids"][0], texts.train.tokens[0])
            seen.append((opened_, opened_rows.digest, found.digest))
    assert [one[0] for one in seen] == [(7, 1, ord("a")), (2, 7654321, ord("b"))]
    assert seen[0][1] != seen[1][1], "rows"
    assert seen[0][2] != seen[1][2], "lines"


def test_lines_behind_a_url(tmp_path: Path) -> None:
    store, path = open_store("memory://lines/part-0.jsonl")
    store.write_atomic(path, b'{"n": 0}\n{"n": 1}\n', fsync=False)
    store.write_atomic(path.replace("part-0", "part-1"), b'{"n": 2}\n', fsync=False)
    found = opened("memory://lines/part-*.jsonl", tmp_path)

    assert [found[at]["n"] for at in range(len(found))] == [0, 1, 2]


def test_what_cannot_be_read_is_named_all_at_once(
    write: Callable[..., str], tmp_path: Path
) -> None:
    packed, broken = write("a.jsonl.gz", "x"), write("b.jsonl", '{"n": 0}\n{"n": \n')
    with pytest.raises(DataError, match=r"nowhere/\*.jsonl matches no file; .*/gone.jsonl cannot"):
        JsonLines([f"{tmp_path}/nowhere/*.jsonl", broken, f"{tmp_path}/gone.jsonl"])
    with pytest.raises(DataError, match=r"a.jsonl.gz: a line of a compressed file"):
        JsonLines(packed)
    with pytest.raises(DataError, match=r"b.jsonl: non-empty line 2, at byte 9, is not JSON"):
        opened(broken, tmp_path)[1]


def test_a_file_that_became_shorter_is_named(write: Callable[..., str], tmp_path: Path) -> None:
    """The index of this process is of the longer one."""
    path = write("a.jsonl", "[1, 2]\n[3, 4]\n")
    found = opened(path, tmp_path)
    write("a.jsonl", "[1, 2]\n")
    with pytest.raises(DataError, match=r"a.jsonl cannot be read"):
        found[1]


@pytest.fixture
def parquet(tmp_path: Path) -> list[str]:
    """Two files with ten row groups together, 3 to 5 rows each."""
    arrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    from pyarrow import parquet

    paths = []
    for name, rows, group in (("a", range(18), 3), ("b", range(18, 38), 5)):
        table = arrow.table(
            {
                "n": list(rows),
                "tokens": [[n, n + 1, n + 2] for n in rows],
                "text": [f"row {n}" for n in rows],
            }
        )
        paths.append(f"{tmp_path}/{name}.parquet")
        parquet.write_table(table, paths[-1], row_group_size=group)
    return paths


def test_rows_of_all_files_in_their_order(parquet: list[str], tmp_path: Path) -> None:
    found = ParquetRows(f"{tmp_path}/*.parquet", columns=["n", "tokens"])

    rows = [found[at] for at in range(len(found))]
    assert [row["n"] for row in rows] == list(range(38))
    assert all(row.keys() == {"n", "tokens"} for row in rows)
    assert rows[20]["tokens"].tolist() == [20, 21, 22]
    assert found.digest != ParquetRows(parquet, columns=["n"]).digest
    assert ParquetRows(parquet)[37]["text"] == "row 37"


def test_a_row_group_is_read_once_for_a_batch_and_kept(
    parquet: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow.parquet import ParquetFile

    read: list[int] = []
    real = ParquetFile.read_row_group

    def counted(file: Any, group: int, **more: Any) -> Any:
        read.append(group)
        return real(file, group, **more)

    monkeypatch.setattr(ParquetFile, "read_row_group", counted)
    found = ParquetRows(parquet, columns=["n"], cache_bytes=100)

    batch = found.__getitems__([37, 0, 20, 1, 36, 0])
    assert [row["n"] for row in batch] == [37, 0, 20, 1, 36, 0]
    assert sorted(read) == [0, 0, 3]
    found.__getitems__([36, 37])
    assert sorted(read) == [0, 0, 3]
    for at in range(38):
        found[at]
    assert found[0]["n"] == 0
    assert read.count(0) > 2, "100 bytes hold two groups"


def test_parquet_behind_a_url_and_through_readers(parquet: list[str]) -> None:
    """Arrow's threads do not outlive a fork."""
    store, path = open_store("memory://rows/a.parquet")
    store.write_atomic(path, Path(parquet[0]).read_bytes(), fsync=False)
    assert ParquetRows("memory://rows/a.parquet")[17]["text"] == "row 17"

    found = ParquetRows(parquet)
    found[0]
    loader = DataLoader(found, num_workers=2)
    assert loader.digest == found.digest
    order = DataOrder(seed=0, num_samples=38, global_batch=4)
    batches = loader.batches(order, seed=0, micro_batch=4, numbers=[0])
    numbers = [n for _ in range(19) for n in next(batches)["n"].tolist()]
    batches.close()
    assert numbers == order.samples(0, 76).tolist()


def test_bad_parquet_is_named(parquet: list[str], write: Callable[..., str]) -> None:
    with pytest.raises(DataError, match=r"c.parquet is not a Parquet file"):
        ParquetRows(write("c.parquet", "no"))
    with pytest.raises(DataError, match=r"a.parquet has no column words; it has n, tokens, text"):
        ParquetRows(parquet, columns=["n", "words"])


def test_lists_of_numbers_become_tensors(parquet: list[str]) -> None:
    """torch would turn a batch of Python lists by its side."""
    loader = DataLoader(ParquetRows(parquet, columns=["tokens"]))
    order = DataOrder(seed=0, num_samples=38, global_batch=4)
    batch = next(loader.batches(order, seed=0, micro_batch=4, numbers=[0]))
    assert batch["tokens"].shape == (4, 3)
    firsts = [int(row[0]) for row in batch["tokens"]]
    assert firsts == order.samples(0, 4).tolist()
    assert np.issubdtype(ParquetRows(parquet)[0]["tokens"].dtype, np.integer)
    assert json.dumps(ParquetRows(parquet)[0]["n"]) == "0"


_NAMELESS = """
import os
import pwd
from pathlib import Path
from everstep import DataSettings, JsonLines
from workers.data import open_texts

Path("d.jsonl").write_text('{"a": 1}\\n' * 10)
for number in range(30):
    Path(f"{number}.txt").write_text(f"{number:02d}" * 50)

def read(cache):
    settings = DataSettings(
        source="*.txt", sequence_length=8, validation_share=0.3, cache_directory=cache
    )
    texts = open_texts(settings)
    return len(JsonLines("d.jsonl", cache=cache or None)), texts.train.num_samples

# Modules may lie where others cannot read.
before = read("root")
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
try:
    raise SystemExit(f"it has a name: {pwd.getpwuid(os.getuid())}")
except KeyError:
    pass
assert read("") == before
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_whose_number_has_no_name_reads_data() -> None:
    """Containers run under such numbers, without a home."""
    # The folders above ``tmp_path`` are closed to other users.
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o777)
        environment = {"TMPDIR": place, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run([sys.executable, "-c", _NAMELESS], cwd=place, env=environment, check=True)
