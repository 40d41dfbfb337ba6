"""A node's sources of notices: the cloud's service, a file, a command. Each call may block.

Sources of the formats and periods:
AWS: docs.aws.amazon.com/AWSEC2/latest/UserGuide, "spot-instance-termination-notices" and
"rebalance-recommendations"; Google: cloud.google.com/compute/docs/metadata,
"getting-live-migration-notice" and "querying-metadata"; Azure: learn.microsoft.com/azure,
"virtual-machines/linux/scheduled-events".
"""

import contextlib
import shlex
import subprocess
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import quote, urlsplit

from workers.keeper.notices import answers
from workers.keeper.notices.machine import CLOUDS, has_gpus, recognised
from workers.protocol import Notice

#: Errors of a source without an answer, or with one that makes no sense. It may raise any error,
#: because an answer may hold anything, such as nested brackets or years of eleven digits.
FAILURES: Final = (Exception,)
#: Address of all three clouds' services on the machine's link; it needs no name lookup.
_ENDPOINT: Final = "http://169.254.169.254"
#: A service on the machine's own link answers in milliseconds.
_ANSWER_S: Final = 5.0
#: Maximum size of an answer. The events of a thousand machines take about half of this.
_ANSWER_BYTES_MAX: Final = 1 << 20
#: Seconds for which Google's service holds back the answer until it changes.
_HANG_S: Final = 5
_TOKEN_LIVES_S: Final = 21600
#: Time limit of the user's own command.
_COMMAND_S: Final = 30.0


class NoticeSource(Protocol):
    """A source that may announce the end of this machine."""

    name: str  #: Name for people.
    advice: str  #: Advice to the user if the source does not answer.
    period_s: float  #: Period of polling it, in seconds.

    def look(self) -> Notice | None:
        """Return the present notice of the source; raise one of ``FAILURES``."""


def no_answer(source: NoticeSource, error: Exception) -> str:
    """Return a line about a source that raised ``error``."""
    why = str(error) or type(error).__name__
    return f"{source.name} does not answer: {why} ({source.advice})"


def sources_of(
    *, cloud: str = "none", endpoint: str = "", file: str = "", command: str = ""
) -> list[NoticeSource]:
    """Return the sources of the section ``notices`` of the configuration."""
    is_auto, cloud = cloud == "auto", recognised() if cloud == "auto" else cloud
    found: list[NoticeSource] = []
    if cloud in _SERVICES:
        found.append(_SERVICES[cloud](endpoint or _ENDPOINT))
    elif is_auto and endpoint:
        found.append(_Unknown(endpoint))
    if file:
        found.append(_File(Path(file)))
    if command:
        found.append(_Command(command))
    return found


class _Unknown:
    """An endpoint on a machine whose firmware does not name a known cloud."""

    advice = f"set notices.cloud to one of {', '.join(CLOUDS)}"
    period_s = 60.0

    def __init__(self, endpoint: str) -> None:
        self.name = f"notices.endpoint {endpoint}"

    def look(self) -> Notice | None:
        """Raise an error, because the protocol is unknown."""
        raise ValueError(
            "the firmware of this machine names no known cloud, so the "
            "endpoint's protocol is unknown"
        )


class _Service:
    """A metadata service over HTTP; proxies are not used."""

    name = ""
    advice = "check whether this machine reaches it, or set notices.cloud: none to switch this off"
    period_s = 1.0

    def __init__(self, endpoint: str) -> None:
        self._address = urlsplit(endpoint).netloc

    def _ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        hang_s: float = 0.0,
    ) -> tuple[int, str, HTTPMessage]:
        """Return status, text and headers of a complete answer."""
        connection = HTTPConnection(self._address, timeout=_ANSWER_S + hang_s)
        with contextlib.closing(connection):
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            text = answer.read(_ANSWER_BYTES_MAX)
            is_whole = not answer.length and not answer.read(1)
        if not is_whole:
            raise ValueError(
                f"the answer to {path} is shorter than announced, or over {_ANSWER_BYTES_MAX} bytes"
            )
        return answer.status, text.decode("utf-8", "replace"), answer.headers

    def _said(self, path: str, headers: Mapping[str, str]) -> str:
        status, text, _ = self._ask(path, headers)
        return _fine(path, status, text)


class _Aws(_Service):
    """IMDSv2: get a token first, which a container receives if the hop limit is 2."""

    name = "the metadata service of aws"
    advice = "containers need a hop limit of 2; set notices.cloud: none to switch this off"
    #: As AWS advises.
    period_s = 5.0

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._token = ""

    def look(self) -> Notice | None:
        """Return the interruption of a spot instance, or else the warning that one is likely."""
        return answers.aws(
            self._maybe("spot/instance-action"), self._maybe("events/recommendations/rebalance")
        )

    def _maybe(self, name: str) -> str | None:
        path = f"/latest/meta-data/{name}"
        for _ in range(2):
            if not self._token:
                lives = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LIVES_S)}
                status, text, _ = self._ask("/latest/api/token", lives, method="PUT")
                self._token = _fine("/latest/api/token", status, text)
            status, text, _ = self._ask(path, {"X-aws-ec2-metadata-token": self._token})
            if status == HTTPStatus.NOT_FOUND:
                return None
            if status != HTTPStatus.UNAUTHORIZED:
                return _fine(path, status, text)
            self._token = ""
        raise ValueError(f"{path} takes no token that it gave")


class _Gcp(_Service):
    """Compute Engine.

    The service holds back the answer until it changes, so the keeper sees changes at once.
    """

    name = "the metadata service of gcp"
    _HEADERS: Final = {"Metadata-Flavor": "Google"}

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._etag = ""
        self._notice: Notice | None = None
        self._has_gpus = has_gpus()

    def look(self) -> Notice | None:
        """Return a preemption or a stop for maintenance; the first notice sets the deadline."""
        root = "/computeMetadata/v1/instance"
        path = f"{root}/preempted"
        # If the service refuses it, the next request does without it.
        etag, self._etag = quote(self._etag, safe=""), ""
        wait = f"?wait_for_change=true&timeout_sec={_HANG_S}&last_etag={etag}"
        status, text, headers = self._ask(
            path + (wait if etag else ""), self._HEADERS, hang_s=_HANG_S
        )
        preempted, maintenance = _fine(path, status, text), ""
        if preempted.strip() != "TRUE":
            maintenance = self._said(f"{root}/maintenance-event", self._HEADERS)
        found = answers.gcp(preempted, maintenance, has_gpus=self._has_gpus)
        self._etag = headers.get("ETag", "")
        if found is None:
            self._notice = None
        elif self._notice is None or self._notice.what != found[0]:
            deadline_s = time.time() + found[1]  # noqa: TID251  as people and providers count it
            self._notice = Notice(what=found[0], deadline_s=deadline_s)
        return self._notice


class _Azure(_Service):
    """Scheduled Events, which Azure begins to offer up to two minutes after the first request."""

    name = "the metadata service of azure"
    _HEADERS: Final = {"Metadata": "true"}

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._machine = ""

    def look(self) -> Notice | None:
        """Return the next event of this machine."""
        if not self._machine:
            where = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = self._said(where, self._HEADERS).strip()
        events = self._said("/metadata/scheduledevents?api-version=2020-07-01", self._HEADERS)
        return answers.azure(events, machine=self._machine)


class _File:
    """A file that exists while the machine is under notice."""

    advice = "see notices.file"
    period_s = 1.0

    def __init__(self, path: Path) -> None:
        self.name = f"the file {path}"
        self._path = path

    def look(self) -> Notice | None:
        """Return the file's notice; seconds in it count from the time when it was written."""
        try:
            with self._path.open(encoding="utf-8") as file:
                text, told_s = file.read(_ANSWER_BYTES_MAX), self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        return answers.own(text, told_s=told_s)


class _Command:
    """A command that prints something while the machine is under notice."""

    advice = "run it on this machine, see notices.command"
    period_s = 5.0

    def __init__(self, command: str) -> None:
        self.name = f"the command {command}"
        self._command = command
        self._said, self._told_s = "", 0.0

    def look(self) -> Notice | None:
        """Return the command's notice; seconds in it count from when it was first printed."""
        try:
            done = subprocess.run(  # noqa: S603  the user's own
                shlex.split(self._command),
                capture_output=True, text=True, timeout=_COMMAND_S, check=True,
            )  # fmt: skip
        except subprocess.SubprocessError as error:
            raise OSError(str(error)) from error
        if done.stdout != self._said:
            self._said = done.stdout
            self._told_s = time.time()  # noqa: TID251  as people and providers count it
        return answers.own(self._said, told_s=self._told_s)


def _fine(path: str, status: int, text: str) -> str:
    if status != HTTPStatus.OK:
        raise ValueError(f"{path} answers {status}")
    return text


_SERVICES: Final[dict[str, type[_Aws | _Gcp | _Azure]]] = {
    "aws": _Aws, "gcp": _Gcp, "azure": _Azure,
}  # fmt: skip
