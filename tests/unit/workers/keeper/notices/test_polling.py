"""Real questions to a server of this process that answers as the documents say."""

import json
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.metadata_server import (
    AWS_ACTION,
    AWS_REBALANCE,
    AZURE_EVENTS,
    AZURE_NAME,
    GCP_MAINTENANCE,
    GCP_PREEMPTED,
    Metadata,
    serve,
)
from workers.keeper.notices import CLOUDS, NoticeWatch, machine, no_answer, sources_of

WAIT_S_MAX = 60.0
STOPS = '{"action": "stop", "time": "2099-11-25T08:22:00Z"}'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Metadata]:
    """Return a server that knows of no notice."""
    with serve(tmp_path / "said") as metadata:
        yield metadata


@contextmanager
def _watching(**asked: str) -> Iterator[NoticeWatch]:
    found = sources_of(**asked)
    for source in found:
        source.period_s = 0.05
    watch = NoticeWatch(found)
    try:
        yield watch
    finally:
        watch.close()


def _wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _what(watch: NoticeWatch) -> str:
    notice = watch.notice()
    return notice.what if notice else ""


def test_a_notice_of_aws_comes_changes_and_is_withdrawn(server: Metadata) -> None:
    """It needs a token, and gets another one when that has run out."""
    with _watching(cloud="aws", endpoint=server.endpoint) as watch:
        _wait(lambda: len(server.asked) > 2)
        assert (_what(watch), watch.problems()) == ("", ())
        server.say(AWS_REBALANCE, '{"noticeTime": "2026-11-25T08:16:02Z"}')
        _wait(lambda: "rebalance" in _what(watch))
        server.num_tokens += 1
        server.say(AWS_ACTION, STOPS)
        _wait(lambda: _what(watch) == "aws: spot instance, stop")
        notice = watch.notice()
        assert notice is not None
        assert 0.0 < notice.left_s < notice.deadline_s
        server.say(AWS_ACTION, None)
        server.say(AWS_REBALANCE, None)
        _wait(lambda: watch.notice() is None)


def test_a_preemption_by_google_is_known_when_it_is_made_known(server: Metadata) -> None:
    """The question waits for a change; the time since then counts, not that since each answer."""
    server.say(GCP_PREEMPTED, "FALSE")
    server.say(GCP_MAINTENANCE, "NONE")
    with _watching(cloud="gcp", endpoint=server.endpoint) as watch:
        _wait(lambda: any("wait_for_change" in path for path in server.asked))
        server.say(GCP_PREEMPTED, "TRUE")
        _wait(lambda: _what(watch) == "gcp: preempted")
        first, num_asked = watch.notice(), len(server.asked)
        _wait(lambda: len(server.asked) > num_asked)
        assert first is not None
        assert watch.notice() == first
        assert 0.0 < first.left_s <= 30.0


def test_azure_is_asked_for_this_machine(server: Metadata) -> None:
    """The events of a scale set name machines as the machine itself is named."""
    event = {
        "EventId": "1", "EventType": "Preempt", "Resources": ["spot_1"],
        "NotBefore": "Wed, 25 Nov 2099 08:22:00 GMT",
    }  # fmt: skip
    server.say(AZURE_NAME, "spot_1")
    server.say(AZURE_EVENTS, json.dumps({"Events": []}))
    with _watching(cloud="azure", endpoint=server.endpoint) as watch:
        server.say(AZURE_EVENTS, json.dumps({"Events": [event]}))
        _wait(lambda: _what(watch) == "azure: Preempt, event 1")


def test_a_file_and_a_command_of_ones_own_are_heeded(tmp_path: Path) -> None:
    """The one of several notices that ends first counts."""
    file, printed = tmp_path / "notice", tmp_path / "printed"
    printed.write_text("")
    show = f"import sys; sys.stdout.write(open({str(printed)!r}).read())"
    command = shlex.join([sys.executable, "-c", show])
    with _watching(file=str(file), command=command) as watch:
        printed.write_text("3600 the rack is cleaned")
        _wait(lambda: _what(watch) == "the rack is cleaned")
        file.write_text("60 power")
        _wait(lambda: _what(watch) == "power")
        file.unlink()
        _wait(lambda: _what(watch) == "the rack is cleaned")
        printed.write_text("")
        _wait(lambda: watch.notice() is None)


@pytest.mark.parametrize(
    "answer",
    [
        "[" * 100000,
        '{"action": "stop", "time": "Wed, 25 Nov 99999999999 00:00:00 GMT"}',
        STOPS + " " * 2**21,
    ],
    ids=["nested", "year", "long"],
)
def test_no_answer_ends_the_watch(server: Metadata, answer: str) -> None:
    """Its thread was gone without a report, and the next notice was not heard."""
    server.say(AWS_ACTION, answer)
    with _watching(cloud="aws", endpoint=server.endpoint) as watch:
        _wait(lambda: bool(watch.problems()))
        server.say(AWS_ACTION, STOPS)
        _wait(lambda: _what(watch) == "aws: spot instance, stop" and not watch.problems())


@pytest.mark.parametrize("command", ["echo 'x", " ", "/no/such/command"])
def test_a_command_that_cannot_be_run_is_reported(command: str) -> None:
    """One with an open quote ended the keeper as it began."""
    with _watching(command=command) as watch:
        _wait(lambda: bool(watch.problems()))
        assert watch.problems()[0].startswith(f"the command {command} does not answer: ")


def test_google_is_asked_again_after_an_etag_that_it_refuses(server: Metadata) -> None:
    """The question that waits for a change was refused for ever, and no preemption was seen."""
    server.say(GCP_PREEMPTED, "FALSE")
    server.say(GCP_MAINTENANCE, "NONE")
    server.refuses_etags = True
    (source,) = sources_of(cloud="gcp", endpoint=server.endpoint)
    assert source.look() is None
    with pytest.raises(ValueError, match="answers 400"):
        source.look()
    server.say(GCP_PREEMPTED, "TRUE")
    notice = source.look()
    assert notice is not None
    assert notice.what == "gcp: preempted"


def test_an_event_of_azure_that_has_begun_is_the_same_at_each_look(server: Metadata) -> None:
    """Each had a later end, and each was told to the run."""
    event = {"EventId": "1", "EventType": "Preempt", "Resources": ["spot_1"], "NotBefore": ""}
    server.say(AZURE_NAME, "spot_1")
    server.say(AZURE_EVENTS, json.dumps({"Events": [event]}))
    (source,) = sources_of(cloud="azure", endpoint=server.endpoint)
    first = source.look()
    assert first is not None
    assert source.look() == first


def test_an_unknown_endpoint_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not asked, and nothing said so."""
    monkeypatch.setattr(machine, "_DMI", Path("/nowhere"))
    with _watching(cloud="auto", endpoint="http://127.0.0.1:9") as watch:
        _wait(lambda: bool(watch.problems()))
        (problem,) = watch.problems()
    assert "notices.endpoint http://127.0.0.1:9 does not answer: the firmware" in problem
    assert "set notices.cloud to one of aws, gcp, azure" in problem
    assert sources_of(cloud="auto") == []


def test_each_source_has_advice_of_its_own(tmp_path: Path) -> None:
    """A file that cannot be read was met with a hop limit of AWS."""
    file, command = str(tmp_path), "/no/such/command"
    told = [
        no_answer(source, OSError("broken"))
        for cloud in CLOUDS
        for source in sources_of(cloud=cloud, file=file, command=command)
    ]
    assert ["hop limit" in line for line in told] == [True] + 8 * [False]
    assert told[1] == f"the file {file} does not answer: broken (see notices.file)"


def test_a_service_that_does_not_answer_is_reported_once_and_revokes_no_notice(
    server: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    """A service may restart, and a machine of no cloud has none: both must cost nothing."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        closed = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    with _watching(cloud="aws", endpoint=closed) as watch:
        _wait(lambda: bool(watch.problems()))
        assert watch.problems()[0].startswith("the metadata service of aws does not answer")
    server.say(AWS_ACTION, STOPS)
    with _watching(cloud="aws", endpoint=server.endpoint) as watch:
        _wait(lambda: bool(_what(watch)))
        server.say(AWS_ACTION, "<html>busy</html>")
        _wait(lambda: bool(watch.problems()))
        assert _what(watch) == "aws: spot instance, stop"
        told = [record for record in caplog.records if record.message.startswith("notices of ")]
        num_asked = len(server.asked)
        _wait(lambda: len(server.asked) >= num_asked + 2)
        assert len(told) == 2
        server.say(AWS_ACTION, None)
        _wait(lambda: not _what(watch) and not watch.problems())
