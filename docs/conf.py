"""The documentation: MyST pages that run, a reference made of docstrings; `make docs` builds it."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
# Of the kernels that run the pages: this tree before an installed one, figures for both themes.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
os.environ["MATPLOTLIBRC"] = str(HERE / "matplotlibrc")

import docstrings
import formulas
import generate

import performer

project = "Performer"
author = copyright = "performer-jax contributors"
version = release = performer.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
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
nb_code_prompt_show = "Show the code of the figure"
nb_code_prompt_hide = "Hide the code of the figure"

autodoc_default_options = {"member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
napoleon_attr_annotations = False

# The few names that signatures link to: a build needs no network.
intersphinx_mapping = {
    "jax": ("https://docs.jax.dev/en/latest", "inventories/jax.txt"),
    "flax": ("https://flax.readthedocs.io/en/latest", "inventories/flax.txt"),
    "numpy": ("https://numpy.org/doc/stable", "inventories/numpy.txt"),
}

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "Performer"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sourcelink = False
html_copy_source = False
copybutton_selector = ":not(.output) > div.highlight > pre"
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. ", True


def setup(app):
    """Writes what is made of the code, and reads docstrings as the plain text that they are."""
    formulas.setup(app)
    generate.write(HERE / "reference")
    generate.notebooks(HERE)
    app.connect("source-read", generate.extend)
    app.connect("autodoc-process-docstring", docstrings.process, priority=400)
    app.connect("autodoc-process-signature", docstrings.shorten)
    app.connect("doctree-read", docstrings.rename)
