"""Chromium without a window, driven over the pipe of its DevTools protocol: no package is needed for it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find():
    """The path of a Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A page in a Chromium of its own. What it logs, the errors it raises and what it asks for stand in `events`."""

    def __init__(self, folder, seconds=60):
        self.deadline = time.monotonic() + seconds
        self.events, self._number, self._rest = [], 0, b""
        to_them, self._to = os.pipe()
        self._from, to_us = os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to_them, to_us)]
        command = [find(), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += ["--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=lambda: [os.dup2(end, 3 + i) for i, end in enumerate(ends)],  # where it looks for them
        )
        for fd in (to_them, to_us, *ends):
            os.close(fd)
        self._session = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        os.close(self._to)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def call(self, method, **params):
        """Call a method of the protocol and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _read(self):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, self.deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            self._rest += os.read(self._from, 1 << 16)
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def open(self, path, width=1280, height=900, scheme="light"):
        """Load a file into a window of this size, with light or dark colours."""
        self.resize(width, height)
        self.media(scheme)
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def resize(self, width, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, scheme, media=""):
        """Light or dark; media="print" is how it looks on paper."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def ask(self, script):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key):
        """Press a key in the element that has the focus."""
        codes = {"Enter": (13, "\r"), "Tab": (9, ""), " ": (32, " ")}
        code, text = codes[key]
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if kind == "keyDown" and text else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **typed)

    def click(self, selector):
        """Click in the middle of an element."""
        place = "(e => { e.scrollIntoView({behavior: 'instant', block: 'center'}); const r = e.getBoundingClientRect();"
        x, y = self.ask(
            f"{place} return [r.x + r.width / 2, r.y + r.height / 2] }})(document.querySelector({selector!r}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def pdf(self):
        """The page on A4, by its own print stylesheet."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])

    def screenshot(self, whole=True):
        """A PNG of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def heard(self, *methods):
        """The events of these methods."""
        return [event["params"] for event in self.events if event.get("method") in methods]
