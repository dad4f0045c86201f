"""A page to try a network on: draw or drop a picture, change its size, and see what the network says."""

from scalesteer.app.demo.app import DemoServer, serve
from scalesteer.app.demo.model import DemoModel

__all__ = ["DemoModel", "DemoServer", "serve"]
