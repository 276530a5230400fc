"""How Sphinx makes the documentation site of the pages in this folder; docs/contributing.md has the command."""

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

# Pages are Markdown that reads well on GitHub too; links to a heading are checked, as links to files are.
myst_heading_anchors = 3

# Docstrings are plain text with `code` in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = f"megatron_dobb {release}"
html_copy_source = False
