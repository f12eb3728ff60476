"""The documentation: MyST pages that run, a reference made of docstrings; `make docs` builds it."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import docstrings
import generate

import performer

project = "Performer"
author = copyright = "the Performer authors"
version = release = performer.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"
suppress_warnings = ["ref.python"]  # several records have a field of one name

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "cache")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
napoleon_attr_annotations = False

html_theme = "furo"
html_title = "Performer"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sourcelink = False
html_copy_source = False


def setup(app):
    """Writes what is made of the code, and reads docstrings as the plain text that they are."""
    generate.write(HERE / "reference")
    app.connect("autodoc-process-docstring", docstrings.process, priority=400)
    app.connect("autodoc-process-signature", docstrings.shorten)
