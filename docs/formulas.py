"""Formulas as MathML, which browsers show without a script from the network."""

from docutils import nodes
from latex2mathml.converter import convert


def setup(app) -> None:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))


def inline(translator, node: nodes.math) -> None:
    """Visit a formula in a line."""
    translator.body.append(mathml(node, "inline"))
    raise nodes.SkipNode


def block(translator, node: nodes.math_block) -> None:
    """Visit a formula between two paragraphs."""
    translator.body.append(f'<div class="math">{mathml(node, "block")}</div>\n')
    raise nodes.SkipNode


def mathml(node: nodes.Element, display: str) -> str:
    """The formula of a node, with the tilde of `\\\\sim` as an operator.

    Bars of norms have the height of the line: a stretched closing one sinks below its exponent.
    """
    text = convert(node.astext(), display=display)
    for bar in ("&#x0007C;", "&#x02016;"):
        text = text.replace(f"<mo>{bar}</mo>", f'<mo stretchy="false">{bar}</mo>')
    return text.replace("<mi>&#x0007E;</mi>", "<mo>&#x0223C;</mo>")
