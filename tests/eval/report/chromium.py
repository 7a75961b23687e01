"""A headless Chromium, where the machine has one: pages are opened as readers open them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Browser:
    """One page, driven by the DevTools protocol over two pipes (--remote-debugging-pipe).

    said: errors and warnings of the console, exceptions, and what the page's policy refused.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = os.fdopen(to, "wb"), os.fdopen(back, "rb")
        self._number, self._session, self._rest = 0, "", b""
        self.said: list[str] = []

    def start(self) -> None:
        """Opens an empty page."""
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Runtime", "Log", "Page"):
            self._send(f"{domain}.enable")

    def open(self, path: Path, width: int = 1300, height: int = 900) -> None:
        """Loads a file, in a window of that size."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **sizes)
        self._send("Page.navigate", url=path.resolve().as_uri())
        self.run("new Promise(done => document.readyState === 'complete' ? done() : "
                 "addEventListener('load', done))")  # fmt: skip

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self._send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as a PNG file."""
        found = self._send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Closes the pipes."""
        with contextlib.suppress(OSError):
            self._to.close()
        self._back.close()

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            self._note(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], 300)
            assert ready, "the browser does not answer"
            more = os.read(self._back.fileno(), 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        of = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.said.append(json.dumps(of["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded":
            self.said.append(of["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled":
            self.said.append(json.dumps(of["args"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Skips the test where there is no browser. folder: for its profile."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("no Chromium on this machine")
    theirs_in, to = os.pipe()
    back, theirs_out = os.pipe()
    # The protocol is spoken on 3 and 4, which this process may use for something else.
    command = ["/bin/bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", program]
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
               "--remote-debugging-pipe", f"--user-data-dir={folder}"]  # fmt: skip
    process = subprocess.Popen(
        [*command, *options],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    page = Browser(to, back)
    try:
        page.start()
        yield page
    finally:
        page.close()
        process.kill()
        process.wait()
