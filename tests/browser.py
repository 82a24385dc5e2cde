"""Drives pages in a real browser without a window: drawing, mouse, keyboard, script errors.

Chromium is driven over a pair of pipes (`--remote-debugging-pipe`), each message JSON and a zero
byte: https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
HEIGHT = 900  # of the window, pixels
PATIENCE = 120  # seconds for one message
HELPERS = """
const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
// Chooses an option, as a reader does.
const choose = (select, value) => {
  $(select).value = value;
  $(select).dispatchEvent(new Event("change"));
};
// Until what has changed is drawn.
const drawn = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
// Attributes of drawn elements that no number belongs in.
const broken = (within) => $$("svg *", within).filter((node) =>
  [...node.attributes].some(({ value }) => /NaN|undefined|Infinity/.test(value))).length;
"""
KEYS = {"Tab": 9, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38,
        "ArrowRight": 39, "ArrowDown": 40}  # fmt: skip


def found() -> str | None:
    """Path of Chromium on this machine, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one tab.

    Attributes:
        problems: errors and warnings of the open page's scripts.
    """

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._read, write = os.pipe()
        read, self._write = os.pipe()
        command = [program, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._path}/user"]
        actions = [
            (os.POSIX_SPAWN_DUP2, read, 3),  # the browser reads from 3
            (os.POSIX_SPAWN_DUP2, write, 4),  # and writes to 4
            *((os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_WRONLY, 0) for each in (1, 2)),
        ]
        self._process = os.posix_spawn(program, command, os.environ, file_actions=actions)
        os.close(read)
        os.close(write)
        self._buffer, self._number, self._session = b"", 0, None
        self.problems: list[str] = []
        self._loaded = False
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    @property
    def _path(self) -> Path:
        return Path(self._folder.name)

    def open(self, page: str, width: int = 1400, dark: bool = False, media: str = "") -> None:
        """Loads a page of HTML in a window of `width` pixels; `media`: "print" for a printer."""
        path = self._path / "page.html"
        path.write_text(page, encoding="utf-8")
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self.emulate(dark, media)
        self.problems.clear()
        self._loaded = False
        self._ask("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()
        self.run("await drawn();")

    def emulate(self, dark: bool, media: str = "") -> None:
        """Changes theme and medium, as `open` sets them."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def run(self, statements: str) -> Any:
        """Result of statements, which may await and use the names of HELPERS."""
        text = f"(async () => {{ {HELPERS} {statements} }})()"
        answer = self._ask(
            "Runtime.evaluate", expression=text, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        """Presses a key of KEYS, and waits until the page is drawn."""
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, modifiers=8 * shift, **pressed)
        self.run("await drawn();")

    def point(self, x: float, y: float, click: bool = False) -> None:
        """Moves the mouse to a place of the window; clicks there with `click`."""
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.run("await drawn();")

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._write)
        os.close(self._read)
        os.waitpid(self._process, 0)  # it ends with its pipe
        self._folder.cleanup()

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, facts: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        if event == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        if event == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
            self.problems.append(str(facts["args"]))
        if event == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.problems.append(facts["entry"]["text"])
