"""The page of a run in a real browser: headless Chromium, where the machine has one (Debian's package ``chromium``)."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from specactor import report
from tests.test_report import START, STEPS, speculative, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
START_S = 60.0
ANSWER_S = 60.0
WIDTHS = (1200, 400)
LOOK = """({
    wide: document.documentElement.scrollWidth,
    window: window.innerWidth,
    pictures: [...document.images].map(i => ({
        name: i.alt, loaded: i.complete && i.naturalWidth > 0,
        width: i.getBoundingClientRect().width, height: i.getBoundingClientRect().height,
        left: i.getBoundingClientRect().left, right: i.getBoundingClientRect().right})),
})"""

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")


@contextmanager
def browser() -> Iterator[str]:
    """Start a browser; yield the address at which it takes commands, on loopback."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0")
        process = subprocess.Popen(
            [CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "DevTools listening on" in line)
            yield line.split()[-1]
        finally:
            process.terminate()
            process.communicate(timeout=START_S)


async def look(address: str, page: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what the browser shows at each of `WIDTHS`, and what it complains of."""
    complaints: list[str] = []
    async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
        session = ""

        async def receive(wanted: str, number: int | None = None) -> dict[str, Any]:
            while True:
                message = json.loads((await socket.receive(timeout=ANSWER_S)).data)
                if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                    complaints.append(json.dumps(message["params"]))
                if message.get("method") == wanted or (number is not None and message.get("id") == number):
                    assert "error" not in message, message
                    found: dict[str, Any] = message.get("result", {})
                    return found

        numbers = iter(range(1, 1000))

        async def ask(method: str, **params: Any) -> dict[str, Any]:
            number = next(numbers)
            await socket.send_json(
                {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
            )
            return await receive("", number)

        target = (await ask("Target.createTarget", url="about:blank"))["targetId"]
        session = (await ask("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            await ask(f"{domain}.enable")
        seen = []
        for width in WIDTHS:
            await ask(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
            )
            await ask("Page.navigate", url=page.as_uri())
            await receive("Page.loadEventFired")
            seen.append((await ask("Runtime.evaluate", expression=LOOK, returnByValue=True))["result"]["value"])
    return seen, complaints


def wrong(seen: list[dict[str, Any]], complaints: list[str]) -> list[str]:
    """Say what a reader would see wrong."""
    found = [f"complaint: {text}" for text in complaints]
    for width, page in zip(WIDTHS, seen, strict=True):
        if page["wide"] > width:
            found.append(f"{width}: {page['wide']} pixels wide")
        for picture in page["pictures"]:
            if not picture["loaded"] or min(picture["width"], picture["height"]) < 100:
                found.append(f"{width}: {picture['name']} is not visible")
            if picture["left"] < 0 or picture["right"] > width:
                found.append(f"{width}: {picture['name']} is cut")
    return found


def test_a_browser_shows_every_plot_at_any_width_and_complains_of_nothing(tmp_path: Path) -> None:
    long = "a_drafter_with_a_long_name." * 4
    lines = [START, *(line | speculative() | speculative(drafter=long) for line in STEPS)]
    folder = write_run(tmp_path / "a", lines, config={"name": "x" * 200, "model": {"path": "/models/" + "y" * 200}})
    good = report.write(folder)
    text, dot = good.read_text(), base64.b64encode(b"<svg/>").decode()
    bad = tmp_path / "bad.html"
    bad.write_text(
        text.replace(
            "<main>", '<main><div style="width: 900px">wide</div><img alt="missing" src="http://localhost/x">'
        ).replace("</main>", f'<img alt="empty" src="data:image/svg+xml;base64,{dot}"></main>')
    )
    with browser() as address:
        seen, complaints = asyncio.run(look(address, good))
        assert [len(page["pictures"]) for page in seen] == [text.count("<img ")] * 2
        assert wrong(seen, complaints) == []
        faults = " ".join(wrong(*asyncio.run(look(address, bad))))
    assert "complaint" in faults, "the page's own policy refuses what is not in it"
    assert "400: 9" in faults
    assert "missing is not visible" in faults
    assert "empty is not visible" in faults
