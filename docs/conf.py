"""Sphinx's settings for the site, whose pages `docs/site.py` gathers."""

from sphinx.application import Sphinx

from docs.site import REPOSITORY, link_short_names
from scalesteer import __version__

project = "scalesteer"
author = "The scalesteer developers"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]  # as the forge does it
myst_heading_anchors = 4

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"scalesteer {version}"
html_theme_options = {
    "footer_icons": [{"name": "Repository", "url": REPOSITORY, "html": "The repository", "class": ""}]
}
html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", link_short_names)
