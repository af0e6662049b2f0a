"""Sphinx: how the documentation is built. ``tox run -e docs`` does it, and takes no warning."""

from __future__ import annotations

import importlib.metadata

project = "aiokv"
author = "The aiokv authors"
project_copyright = "The aiokv authors"
release = importlib.metadata.version("aiokv")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.mermaid",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Names only: a page is built without the network.
intersphinx_mapping: dict[str, tuple[str, None]] = {}

html_theme = "furo"
html_title = f"aiokv {release}"
html_theme_options = {"sidebar_hide_name": False, "top_of_page_buttons": []}
