"""Sphinx's settings for the site: `make docs` builds it into docs/_build/html. Nothing is fetched while it is built."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "extensions"))

import tilewise  # noqa: E402

warnings.filterwarnings("ignore", message="transformer_engine module not found")  # by thunder, as it is imported

project = "Tilewise"
author = "the Tilewise authors"
version = release = tilewise.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "pages"]
exclude_patterns = ["_build", "pictures/*.md", "results/*.md"]
nitpicky = True
# Types in signatures that have no entry: those of other packages, since nothing is fetched, and those of our insides.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|np|npt|dist|collections|typing|pathlib|thunder)\..*"),
    (r"py:class", r"\w+"),
    (r"py:class", r"tilewise\.\w+\.\w+\.\w+"),
    (r"py:class", r"tilewise\.scores\.\w+"),
]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
add_module_names = False
highlight_language = "none"  # of a fence that names no language
toc_object_entries_show_parents = "hide"

smartquotes = False
html_theme = "furo"
html_title = f"Tilewise {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "tango"
pygments_dark_style = "monokai"
