"""A headless Chromium, driven by chromedriver over HTTP: opens a file, runs a line of JavaScript, presses keys."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

KEYS = {"left": "\ue012", "right": "\ue014", "home": "\ue011", "end": "\ue010"}
_QUIET = ("disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update")
_FLAGS = ("headless", "no-sandbox", "disable-sync", "disable-dev-shm-usage", *_QUIET)


def missing() -> str:
    """Why there is no browser here, "" where there is one."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    needed = "apt-get install chromium chromium-driver"
    return f"the page was NOT opened: no {' and no '.join(lacking)} here ({needed})" if lacking else ""


class Browser:
    """with Browser() as browser: ...; each has a profile of its own that goes with it."""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._driver.stdout is not None
        said = iter(self._driver.stdout.readline, "")
        port = next((m.group(1) for line in said if (m := re.search(r"successfully on port (\d+)", line))), None)
        if port is None:
            raise RuntimeError(f"chromedriver ended with exit status {self._driver.wait(10)}")
        self._root = f"http://127.0.0.1:{port}/session"
        flags = [f"--{flag}" for flag in (*_FLAGS, f"user-data-dir={self._profile.name}", "window-size=1280,1200")]
        wanted = {"goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}
        self._root += "/" + self._ask("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._ask("", method="DELETE")
        finally:
            self._driver.terminate()
            self._driver.wait(10)
            self._profile.cleanup()

    def open(self, file: Path, place: str = "") -> None:
        """Loads a file from disk, at a place in it."""
        self._ask("/url", {"url": file.as_uri() + place})

    def js(self, line: str, *arguments: Any) -> Any:
        """What an expression gives; `arguments` holds the others."""
        return self._ask("/execute/sync", {"script": f"return {line}", "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Presses keys, by name where they have one."""
        actions = [{"type": kind, "value": KEYS.get(k, k)} for k in keys for kind in ("keyDown", "keyUp")]
        self._ask("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def click(self, selector: str) -> None:
        """Clicks the first element of a CSS selector."""
        found = self._ask("/element", {"using": "css selector", "value": selector})
        self._ask(f"/element/{next(iter(found.values()))}/click", {})

    def log(self) -> list[str]:
        """What the console said: errors, violations, requests that were refused."""
        return [entry["message"] for entry in self._ask("/se/log", {"type": "browser"})]

    def _ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
