"""A page to try a network on: steer a filter, draw or drop a picture, change its size, see what networks say."""

from scalesteer.app.demo.app import DemoServer, serve
from scalesteer.app.demo.model import DemoModel

__all__ = ["DemoModel", "DemoServer", "serve"]
