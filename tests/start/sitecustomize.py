"""Python runs this first in every process that a test starts: it too knows the invented images.

Only where `scalesteer.datasets.sources` is imported anything happens.
"""

import sys
from importlib.machinery import PathFinder


class Sources:
    """Finds that module as usual, and registers the invented releases as soon as it is loaded."""

    @staticmethod
    def find_spec(name, path, target=None):
        if name != "scalesteer.datasets.sources":
            return None
        spec = PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_register(module):
            from tests import invented_images

            load(module)
            invented_images.register(module)

        spec.loader.exec_module = load_and_register
        return spec


sys.meta_path.insert(0, Sources)
