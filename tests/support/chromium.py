"""A headless Chromium, driven by its DevTools protocol."""

import asyncio
import base64
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
_WAIT_S = 60.0


class Browser:
    """One tab. ``profile`` is an empty folder of its own."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None, "the test skips without one"
        self._process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._runner = asyncio.Runner()
        self._number = 0
        port_file = profile / "DevToolsActivePort"
        _wait(lambda: port_file.exists() and port_file.read_text().count("\n") > 0, "it listens")
        self._runner.run(self._connect(int(port_file.read_text().split("\n")[0])))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._session.close())
        self._runner.close()
        self._process.kill()
        self._process.wait()

    def open(self, url: str, *, width: int = 1600, is_dark: bool = False) -> None:
        """Show ``url`` in a window of that width, which a person looks at."""
        self._call("Emulation.setFocusEmulationEnabled", enabled=True)
        scheme = "dark" if is_dark else "light"
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression, as if a person had asked; await a promise."""
        how = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self._call("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def await_true(self, script: str) -> None:
        """Wait until an expression is true on the page."""
        _wait(lambda: self.run(script), script)

    def click(self, selector: str) -> None:
        """Click on the first element that is ``selector``, once it is there."""
        self.await_true(f"Boolean(document.querySelector({selector!r}))")
        self.run(f"document.querySelector({selector!r}).click()")

    def screenshot(self, path: Path, *, size: tuple[int, int] | None = None) -> None:
        """Write the whole page as a PNG, or its top of ``size``: width and height."""
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1} if size else None
        beyond = {"captureBeyondViewport": True, **({"clip": clip} if clip else {})}
        data = self._call("Page.captureScreenshot", **beyond)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._runner.run(self._answered(method, params))

    async def _connect(self, port: int) -> None:
        self._session = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
        async with self._session.get("/json/list") as answer:
            tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
        url = tabs[0]["webSocketDebuggerUrl"]
        self._socket = await self._session.ws_connect(url, max_msg_size=0)

    async def _answered(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            answer = await self._socket.receive_json(timeout=_WAIT_S)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])


def _wait(condition: Any, what: str) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {_WAIT_S:.0f} s: {what}"
        time.sleep(0.05)
