"""The docstrings of this project, plain text in sections, as reStructuredText.

Napoleon reads the sections (Args, Returns, Raises, Example). Before that, what reStructuredText
would take for markup is escaped, and indented paragraphs, which are equations, tables and code,
stay as they are.
"""

import re

import jax.typing
import numpy.typing
from docutils import nodes
from sphinx.util.typing import stringify_annotation

from performer import typing

SECTIONS = re.compile(r"(Args|Parameters|Attributes|Returns|Yields|Raises|Example|Examples):$")
MARKUP = re.compile(r"(?P<code>`[^`]*`)(?=(?P<next>\w?))|(?P<mark>[\\|*])|(?P<letter>\w)_(?=\W|$)")


def process(app, what, name, obj, options, lines):
    """Handle `autodoc-process-docstring`: change the lines in place."""
    if lines and lines[0].startswith("Alias for field number"):  # of a NamedTuple, without a text
        lines[:] = []
    # Of an attribute napoleon takes what stands before a colon in the first line for its type.
    # It drops empty lines at the start; an empty comment stays.
    comment = ["..", ""] if what in ("attribute", "data", "property") else []
    lines[:] = comment + converted(lines)


def shorten(app, what, name, obj, options, signature, returned):
    """Handle `autodoc-process-signature`: aliases of types by their names."""
    return tuple(text and aliased(text) for text in (signature, returned))


def rename(app, doctree):
    """Handle `doctree-read`: JAX's arrays by their public name, also in the types of attributes."""
    for text in list(doctree.findall(nodes.Text)):
        if "jaxlib._jax.Array" in text:
            text.parent.replace(text, nodes.Text(text.replace("jaxlib._jax.Array", "Array")))


NAMES = {name: getattr(typing, name) for name in ("Coupling", "Directions", "Norms", "Key")} | {
    "~jax.typing.ArrayLike": jax.typing.ArrayLike,
    "~numpy.typing.ArrayLike": numpy.typing.ArrayLike,
}
EITHER = re.compile(
    r"(~jaxtyping\.\w+\[)jaxlib\._jax\.Array, ('[^']*'\]) \| \1ndarray, \2"
    r"(?: \| (?:bool|int|float|complex))*"
)
"""A shaped ArrayLike, which jaxtyping writes as a union."""


def aliased(signature: str) -> str:
    """The signature with names instead of what they stand for, the longest first."""
    written = {stringify_annotation(value, "smart"): name for name, value in NAMES.items()}
    for text in sorted(written, key=len, reverse=True):
        signature = signature.replace(text, written[text])
    signature = EITHER.sub(r"\1ArrayLike, \2", signature)
    signature = signature.replace("jax.jaxlib._jax.Array", "jax.Array")
    return signature.replace("jaxlib._jax.Array", "Array")


def converted(lines: list[str]) -> list[str]:
    """The docstring for napoleon."""
    section, block, blank, result = "", False, False, []
    for line in lines:
        indent, text = len(line) - len(line.lstrip()), line.strip()
        if text and not indent:
            heading = SECTIONS.match(line)
            section = heading[1] if heading else ""
        base = 4 if section else 0
        if text:
            deeper = indent >= base + 4 and section in ("", "Example", "Examples")
            if deeper and blank and not block:
                result += [" " * base + "::", ""]
            block = deeper
        blank = not text
        code = block or text.startswith((">>>", "..."))
        result.append(line if code else MARKUP.sub(escaped, line))
    return result


def escaped(match: re.Match) -> str:
    """Bars, stars and trailing underscores stand for themselves; code between backticks stays."""
    if match["code"]:
        return f"`{match['code']}`" + ("\\ " if match["next"] else "")
    return f"\\{match['mark']}" if match["mark"] else f"{match['letter']}\\_"
