"""Makes the README's picture from a finished demo run: ``python notebooks/report_picture.py cdc-runs/digits-1``.

Head, reliability and the first clusters of its report.html, as Chromium shows them.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH, MOST = 1000, 660


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto((Path(sys.argv[1]) / "report.html").resolve().as_uri())
        whole = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        boxes = {part: page.locator(f"#{part}").bounding_box() for part in ("summary", "reliability", "gallery")}
        browser.close()
    spans = [(box["y"], box["y"] + min(box["height"], MOST)) for box in boxes.values()]
    spans[0] = (0, spans[0][1])
    parts = [whole.crop((0, int(top), WIDTH, int(bottom))) for top, bottom in spans]
    picture = Image.new("RGB", (WIDTH, sum(part.height for part in parts)))
    for number, part in enumerate(parts):
        picture.paste(part, (0, sum(above.height for above in parts[:number])))
    picture.quantize(128).save(Path(__file__).parent / "images" / "report.png", optimize=True)


if __name__ == "__main__":
    main()
