"""Photograph a report: `python docs/make_report_picture.py RECORDINGS PICTURE.png`.

RECORDINGS is a recording or a directory with one per rank, such as vLLM's `trace_dir`. The picture shows the
forward with the most exposed time, down to the bars of its layers, as Chromium draws it.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from kvpp_dag.trace.overlap import analyze
from kvpp_dag.trace.recording import read_recordings
from kvpp_dag.trace.report import to_html

WIDTH = 1280
PATIENCE_MS = 300_000


def main(recordings: Path, picture: Path) -> None:
    """Write the report to a temporary place, open it and photograph it."""
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("No chromium was found on the path; install it first.")
    found = read_recordings(recordings)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        page_file = Path(scratch) / "report.html"
        page_file.write_text(to_html(found, analyze(found)), encoding="utf-8")
        chromium = playwright.chromium.launch(
            executable_path=browser, args=["--no-sandbox", "--disable-gpu"]
        )
        page = chromium.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(page_file.as_uri(), timeout=PATIENCE_MS)
        page.wait_for_selector("#layers .main-svg", timeout=PATIENCE_MS)
        last = page.locator("#layers").bounding_box()
        assert last is not None
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": last["y"] + last["height"] + 32}
        page.screenshot(path=picture, clip=clip, full_page=True)
        chromium.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
