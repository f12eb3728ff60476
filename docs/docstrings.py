"""The docstrings of this project, plain text in sections, as reStructuredText.

Napoleon reads the sections (Args, Returns, Raises, Example). Before that, what reStructuredText
would take for markup is escaped, and indented paragraphs, which are equations, tables and code,
stay as they are.
"""

import re

from sphinx.util.typing import stringify_annotation

from performer import typing

SECTIONS = re.compile(r"(Args|Parameters|Attributes|Returns|Yields|Raises|Example|Examples):$")
MARKUP = re.compile(r"(?P<code>`[^`]*`)(?=(?P<next>\w?))|(?P<mark>[\\|*])|(?P<letter>\w)_(?=\W|$)")


def process(app, what, name, obj, options, lines):
    """Of `autodoc-process-docstring`: changes the lines in place."""
    # Of an attribute napoleon takes what stands before a colon in the first line for its type.
    lines[:] = [""] * (what in ("attribute", "data", "property")) + converted(lines)


def shorten(app, what, name, obj, options, signature, returned):
    """Of `autodoc-process-signature`: the aliases of `performer.typing` by their names."""
    return tuple(text and aliased(text) for text in (signature, returned))


def aliased(signature: str) -> str:
    """The signature with names in the place of what they stand for, the longest first."""
    names = ("Coupling", "Directions", "Norms", "Key")
    written = {stringify_annotation(getattr(typing, name)): name for name in names}
    for text in sorted(written, key=len, reverse=True):
        signature = signature.replace(text, written[text])
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
