"""A headless Chromium for tests, spoken to over DevTools' own pipe: no driver, no library.

`find()` says which binary would be used, or why there is none. One `Browser` runs one process;
`open(url)` gives a page.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium-shell", "chromium", "google-chrome")
DEADLINE = 15.0
MISSING = (
    f"none of {', '.join(NAMES)} is installed: apt-get install chromium-headless-shell, or name a "
    "binary in KVINDEXD_TEST_BROWSER"
)


def find() -> str | None:
    """Path of a Chromium, None without one."""
    named = os.environ.get("KVINDEXD_TEST_BROWSER")
    if named:
        return named
    return next((path for n in NAMES if (path := shutil.which(n))), None)


class Browser:
    """One process. Messages are JSON texts that end with a zero byte, on its descriptors 3, 4."""

    def __init__(self, binary: str, folder: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        self._errors = (folder / "browser.log").open("w+")
        self.process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "browser"),
                binary,
                "--headless",
                "--remote-debugging-pipe",
                f"--user-data-dir={folder}",
                "--no-first-run",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                # Its sandbox does not work as root, nor in most containers; pages are our own.
                "--no-sandbox",
            ],
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(to_browser, from_browser),
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End the process, in order if it can."""
        with contextlib.suppress(AssertionError, OSError, subprocess.TimeoutExpired):
            self.call("Browser.close")
            self.process.wait(5)
        self.process.kill()
        self.process.wait()
        os.close(self._out)
        os.close(self._in)
        self._errors.close()

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """One command and its answer; what happens meanwhile goes to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + DEADLINE
        while True:
            answer = self._read(end)
            if answer is None:
                raise AssertionError(f"{method}: no answer within {DEADLINE} s\n{self.log()}")
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise AssertionError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def _read(self, end: float) -> dict[str, Any] | None:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._in, 1 << 16) if ready else b""
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def log(self) -> str:
        """What the process printed."""
        self._errors.seek(0)
        return self._errors.read()[-3000:]

    def open(self, url: str, width: int = 1280, height: int = 900) -> Page:
        """A new page, still loading."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Runtime", "Log", "Page", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        page.go(url)
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command."""
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        """Navigate."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        got = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in got:
            raise AssertionError(f"{script}: {got['exceptionDetails']}")
        return got["result"].get("value")

    def until(self, script: str, what: str) -> Any:
        """The value of an expression once it is truthy."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if found := self.run(f"({script}) || null"):
                return found
            time.sleep(0.02)
        shown = self.run("document.body.innerText")
        raise AssertionError(f"{what}: not within {DEADLINE} s\n{shown}\n{self.complaints()}")

    def complaints(self) -> list[str]:
        """Errors, violations and warnings that the page caused so far."""
        self.run("0")  # whatever happened before has arrived when this is answered
        out = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = event.get("params", {})
            if event["method"] == "Log.entryAdded":
                entry = params["entry"]
                out.append(f"{entry['level']}: {entry['text']} {entry.get('url', '')}")
            elif event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                out.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                out.append(str(params["args"]))
        return out

    def requested(self) -> list[str]:
        """URLs that the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] == "Network.requestWillBeSent"
        ]

    def picture(self) -> bytes:
        """A PNG of what is seen."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)


@contextlib.contextmanager
def browser(binary: str) -> Iterator[Browser]:
    """A browser with a fresh profile."""
    with tempfile.TemporaryDirectory(
        prefix="kvindexd-browser-", ignore_cleanup_errors=True
    ) as folder:
        running = Browser(binary, Path(folder))
        try:
            yield running
        finally:
            running.close()
