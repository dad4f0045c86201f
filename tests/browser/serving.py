"""What the tests of the page share: where the browser is, a server, and what a busy machine may take."""

import os
import shutil
import threading

from scalesteer.app.demo import DemoServer

CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
MINUTES = 60_000  # Playwright counts milliseconds
WATCH = """setInterval(() => { // how far sliders have been, also those that move by themselves
  for (const slider of document.querySelectorAll("input[type=range]")) {
    slider.farthest = Math.max(slider.farthest ?? -Infinity, Number(slider.value));
  }
}, 20);"""


def allowed(milliseconds):
    """What this machine may take for it, with all else that it does."""
    return milliseconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Serving:
    """A server in a thread, until :meth:`stop`."""

    def __init__(self, model):
        self.server = DemoServer(model)
        self.url = self.server.url
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def stop(self):
        self.server.shutdown()
        self.thread.join()
        self.server.close()
