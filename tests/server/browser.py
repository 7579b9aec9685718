"""A headless Chromium, driven over WebDriver's protocol (https://www.w3.org/TR/webdriver2/) by chromedriver."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.patience import PATIENCE_S, wait_for

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, by the protocol
ENTER, ESCAPE, SHIFT, CONTROL = "\ue007", "\ue00c", "\ue008", "\ue009"
# As a container's root starts it; nothing that it would do by itself.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip


class Browser:
    """One window."""

    def __init__(self, client: httpx2.Client, session: str) -> None:
        self._client = client
        self._session = f"/session/{session}"

    def command(self, method: str, path: str, body: Any = None) -> Any:
        reply = self._client.request(method, f"{self._session}{path}", json={} if body is None else body)
        value = reply.json()["value"]
        assert reply.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self.command("POST", "/url", {"url": url})

    def script(self, source: str, *arguments: Any) -> Any:
        """What the body of a function returns, or the promise that it returns."""
        return self.command("POST", "/execute/sync", {"script": source, "args": arguments})

    def find(self, selector: str) -> str:
        return str(self.command("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT])

    def click(self, selector: str) -> None:
        self.command("POST", f"/element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self.command("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """All at once, wherever the focus is."""
        down, up = ([{"type": kind, "value": key} for key in keys] for kind in ("keyDown", "keyUp"))
        actions = [{"type": "key", "id": "keyboard", "actions": [*down, *reversed(up)]}]
        self.command("POST", "/actions", {"actions": actions})

    def text(self, selector: str) -> str:
        """Of all that the selector finds, as it is shown; "" where there is nothing."""
        found = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText).join('\\n')"
        return str(self.script(found, selector))

    def count(self, selector: str) -> int:
        return int(self.script("return document.querySelectorAll(arguments[0]).length", selector))

    def wait_for_text(self, selector: str, words: str) -> None:
        wait_for(lambda: words in self.text(selector))

    def resize(self, width: int, height: int) -> None:
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def cdp(self, name: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self.command("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def requests(self) -> list[str]:
        """The addresses of all requests over the network since the last call."""
        entries = self.command("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(each["message"])["message"] for each in entries]
        sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if each["request"]["url"].startswith(("http", "ws"))]

    def complaints(self) -> list[str]:
        """What the console has said since the last call."""
        return [each["message"] for each in self.command("POST", "/se/log", {"type": "browser"})]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """profile: an empty folder."""
    assert CHROMIUM is not None and DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            said = next(line for line in driver.stdout if "successfully on port" in line)
            url = "http://127.0.0.1:" + said.strip(".\n").rpartition(" ")[2]
            options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
            logs = {"performance": "ALL", "browser": "ALL"}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
            with httpx2.Client(base_url=url, timeout=PATIENCE_S) as client:
                reply = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
                window = Browser(client, reply["sessionId"])
                try:
                    yield window
                finally:
                    window.command("DELETE", "")
        finally:
            driver.terminate()
