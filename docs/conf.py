"""Sphinx configuration of the documentation site; docs/contributing.md has the build command."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_dobb.version import __version__

project = "megatron_dobb"
author = "the megatron_dobb developers"
copyright = f"{author}, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

# Pages are Markdown that also reads well on GitHub. Links to headings are checked, like links to files.
myst_heading_anchors = 3

# Docstrings are plain text with `code` in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = f"megatron_dobb {release}"
html_copy_source = False
