"""A headless Chromium, spoken to through its DevTools protocol: open a page, run scripts in it, wait until one says true, press
keys."""

import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
KEYS = {  # name -> (virtual key code, what it types)
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "Home": (36, ""),
    "End": (35, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
}
SHIFT, CONTROL = 8, 2  # modifiers of a key


class Page:
    """One tab. `requests` are the addresses that it asked for; `errors` what its console has of errors, but for requests that the
    server refused."""

    def __init__(self, socket: Any):
        self._socket, self._ids = socket, itertools.count()
        self.requests, self.errors = list[str](), list[str]()
        for domain in ("Network", "Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            self._note(message.get("method"), message.get("params", {}))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error" and params["entry"]["source"] != "network":
            self.errors.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(json.dumps(params["args"]))

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def reload(self) -> None:
        self.run("window.old = true")
        self.send("Page.reload")
        self.wait("window.old === undefined && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; of a promise, what it comes to."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never: {condition}"
            time.sleep(0.02)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses and releases a key of KEYS."""
        code, text = KEYS[key]
        params = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", **params, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **params)

    def type(self, text: str) -> None:
        """Types where the focus is."""
        self.send("Input.insertText", text=text)

    def point(self, element: str) -> None:
        """Moves the pointer onto an element, given by an expression."""
        place = self.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])(({element}).getBoundingClientRect())")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])

    def prefer(self, colours: str) -> None:
        """Has the system prefer these colours: "light" or "dark"."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with an empty profile in `folder`, and its tab."""
    assert CHROMIUM is not None
    flags = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--window-size=1200,800",
    )
    command = [CHROMIUM, *flags, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file, deadline = folder / "DevToolsActivePort", time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().strip()):
            assert process.poll() is None and time.monotonic() < deadline, "the browser did not start"
            time.sleep(0.05)
        port = port_file.read_text().split()[0]
        tabs = httpx.get(f"http://127.0.0.1:{port}/json").json()
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        with connect(address, max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(60)
