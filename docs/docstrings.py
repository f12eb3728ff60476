"""The docstrings of this project, plain text in sections, as reStructuredText.

Napoleon reads the sections (Args, Returns, Raises, Example). Before that, what reStructuredText
would take for markup is escaped, and indented paragraphs, which are equations, tables and code,
stay as they are.
"""

import re

from sphinx.util.typing import stringify_annotation

from performer import typing

SECTIONS = re.compile(r"(Args|Parameters|Attributes|Returns|Yields|Raises|Example|Examples):$")
MARKUP = re.compile(r"(`[^`]*`)(?=(\w?))|([\\|*])|(\w)_(?=\W|$)")


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
    section, block, result = "", False, []
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if match := SECTIONS.match(line):
            section, block = match[1], False
            result.append(line)
            continue
        if line and not indent:
            section = ""
        base = 4 if section else 0
        deeper = line.strip() and indent >= base + 4 and section in ("", "Example", "Examples")
        if deeper and not block and not lines[number - 1].strip():
            result += [" " * base + "::", ""]
        if line.strip():
            block = bool(deeper)
        code = block or line.lstrip().startswith((">>>", "..."))
        result.append(line if code else escaped(line))
    return result


def escaped(line: str) -> str:
    """Bars, stars and trailing underscores stand for themselves; code between backticks stays."""

    def replace(match: re.Match) -> str:
        code, next_letter, mark, letter = match.groups()
        if code:
            return f"`{code}`" + ("\\ " if next_letter else "")
        return f"\\{mark}" if mark else f"{letter}\\_"

    return MARKUP.sub(replace, line)
