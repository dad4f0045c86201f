"""Records README's moving picture from the first tab of the page: a filter, a picture and the response grow together.

    python -m docs.page.record      # into results/guide/steering.gif. Another file is taken too

It needs Playwright and chromium (`apt install chromium`, or name another in CHROMIUM).
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from scalesteer.app.demo import DemoModel, DemoServer
from scalesteer.files import require, write_atomically
from scalesteer.harmonics import PAPER_SCALES

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "results/guide/steering.gif"
FRAMES = 28  # from the smallest scale to the largest
STEP, REST = 70, 1200  # milliseconds that a picture is shown, and the first and the last one
WIDTH = 860  # pixels of the window
COLOURS = 128
READY = "() => document.body.dataset.ready"
SET = """scale => {
const slider = document.getElementById("filter-slider");
slider.step = "any"; document.getElementById("image-slider").step = "any";
slider.value = String(scale);
slider.dispatchEvent(new Event("input")); }"""
DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def film(url: str, chromium: str, scales: list[float]) -> list[Any]:
    """What the tab shows at each scale, as pictures of Pillow."""
    pil = require("PIL.Image")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": WIDTH, "height": 900}, reduced_motion="reduce", color_scheme="light"
        )
        page = context.new_page()
        page.goto(f"{url}/#steering")
        page.wait_for_function(READY)
        pictures = []
        for scale in scales:
            page.evaluate(SET, scale)
            page.evaluate(DRAWN)
            pictures.append(pil.open(io.BytesIO(page.locator(".trio").screenshot())).convert("RGB"))
        browser.close()
    return pictures


def to_gif(pictures: list[Any]) -> bytes:
    """There and back, again and again, all in the colours of one palette."""
    pil = require("PIL.Image")
    together = pil.new("RGB", (pictures[0].width, 3 * pictures[0].height))
    for i, one in enumerate((pictures[0], pictures[len(pictures) // 2], pictures[-1])):
        together.paste(one, (0, i * one.height))
    palette = together.quantize(COLOURS, method=pil.Quantize.MEDIANCUT)
    drawn = [one.quantize(palette=palette, dither=pil.Dither.NONE) for one in pictures]
    drawn += drawn[-2:0:-1]
    times = [REST if i in (0, len(pictures) - 1) else STEP for i in range(len(drawn))]
    content = io.BytesIO()
    drawn[0].save(content, "GIF", save_all=True, append_images=drawn[1:], duration=times, loop=0, optimize=False)
    return content.getvalue()


def record(path: Path, frames: int = FRAMES) -> None:
    """Write the moving picture.

    Raises:
        OSError: If there is no chromium.
    """
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise OSError("there is no chromium here: apt install chromium, or name another in CHROMIUM.")
    with DemoServer(DemoModel("digits")) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            scales = np.geomspace(1, PAPER_SCALES[-1], frames).tolist()
            content = to_gif(film(server.url, chromium, scales))
        finally:
            server.shutdown()
            thread.join()
    write_atomically(path, content)


def main(arguments: list[str]) -> int:
    """The command; returns its exit status."""
    path = Path(*arguments[:1] or [PLACE])
    try:
        record(path)
    except OSError as error:
        print(f"record: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
