"""The certificate's page in headless Chromium: it renders, asks for nothing, fits its window, and has both schemes.

Not part of `check`: it needs a browser, and fails without one (`tox -e page`; Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
import zlib
from html import unescape
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_certificate import HOSTILE, certificate, colours

from conformance.fixtures.certificate.page import page

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip
PROBE = """<script>
const widths = {page: document.documentElement.scrollWidth, window: window.innerWidth};
const style = name => getComputedStyle(document.querySelector(name));
const found = {
  widths,
  title: document.title,
  headings: [...document.querySelectorAll("h1, h2")].map(one => one.textContent),
  rows: document.querySelectorAll("table tbody tr").length,
  scripts: document.querySelectorAll("script").length - 1,
  requests: performance.getEntriesByType("resource").map(one => one.name),
  back: style("body").backgroundColor,
  ink: style("body").color,
  hidden: [...document.querySelectorAll("section")].filter(one => one.getBoundingClientRect().height < 10).length,
};
document.body.replaceChildren(Object.assign(document.createElement("pre"), {textContent: JSON.stringify(found)}));
</script>"""


@pytest.fixture(scope="session")
def browser() -> str:
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.fail("this test needs Chromium (Debian: apt-get install chromium)", pytrace=False)
    return found


def chromium(browser: str, tmp_path: Path, *arguments: str) -> str:
    command = [browser, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def probed(browser: str, tmp_path: Path, window: str = "1280,900") -> dict[str, Any]:
    """What a script finds in the page: one that is added here, with the policy that forbids scripts taken away."""
    text, removed = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page(certificate()))
    assert removed == 1
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    dom = chromium(browser, tmp_path, f"--window-size={window}", "--dump-dom", (tmp_path / "page.html").as_uri())
    match = re.search(r"<pre>(.*)</pre>", dom, re.DOTALL)
    assert match is not None, dom
    return json.loads(unescape(match[1]))


def test_the_page_renders_and_asks_for_nothing(browser: str, tmp_path: Path) -> None:
    found = probed(browser, tmp_path)
    assert found["title"] == "Conformance certificate: dspark 0.1, interpret lane"
    assert found["headings"][1:] == [
        "Findings", "Coverage", "What was compared", "Distance to the admissible sets", "Slowest cases", "Waivers",
        "All cases",
    ]  # fmt: skip
    assert found["rows"] > 30
    assert (found["scripts"], found["requests"], found["hidden"]) == (0, [], 0)


@pytest.mark.parametrize("window", ["1280,900", "500,900"])
def test_the_page_is_no_wider_than_its_window(browser: str, window: str, tmp_path: Path) -> None:
    widths = probed(browser, tmp_path, window)["widths"]
    assert widths["page"] <= widths["window"]


def test_the_policy_stops_a_script(browser: str, tmp_path: Path) -> None:
    text = page(certificate()).replace("</body>", "<script>document.title = 'ran'</script></body>")
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    dom = chromium(browser, tmp_path, "--dump-dom", (tmp_path / "page.html").as_uri())
    assert "<title>Conformance certificate" in dom
    assert HOSTILE not in dom


def corner(png: Path) -> str:
    """The colour of the first pixel of a screenshot."""
    data = png.read_bytes()
    chunks, at = b"", 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        chunks += data[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    # The first pixel of the first row: no filter of PNG changes it.
    return "#" + zlib.decompress(chunks)[1:4].hex()


@pytest.mark.parametrize(("scheme", "setting"), [("light", "1"), ("dark", "0")])
def test_both_colour_schemes_are_shown(browser: str, scheme: str, setting: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(certificate()), encoding="utf-8")
    shot = tmp_path / "shot.png"
    arguments = (f"--blink-settings=preferredColorScheme={setting}", f"--screenshot={shot}")
    chromium(browser, tmp_path, *arguments, (tmp_path / "page.html").as_uri())
    assert corner(shot) == colours(scheme)["back"]
