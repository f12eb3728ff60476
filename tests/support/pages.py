"""The code on pages of Markdown: the README, and the pages of docs/ that run."""

import re


def code(text: str, kind: str) -> list[str]:
    """The fenced blocks of that kind in order, as "python" or "{code-cell}", without options."""
    blocks = re.findall(rf"^```{re.escape(kind)}\n(.*?)^```$", text, flags=re.S | re.M)
    return [re.sub(r"\A(?::.*\n)+", "", block) for block in blocks]
