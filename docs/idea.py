"""Draw the picture of the README, light and dark: `python docs/idea.py`."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

INK, ACCENT = {"light": "#24292f", "dark": "#e6edf3"}, {"light": "#0969da", "dark": "#4493f8"}


def box(axes: Axes, center: tuple[float, float], text: str, color: str, width: float = 1.5) -> None:
    """A label in a frame."""
    x, y = center
    frame = plt.Rectangle((x - width / 2, y - 0.36), width, 0.72, fill=False, ec=color, lw=1.4)
    axes.add_patch(frame)
    axes.text(x, y, text, ha="center", va="center", color=color, fontsize=10)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    """An arrow between two points."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color, "lw": 1.2})


def draw(theme: str) -> None:
    """Queries and keys become features; keys and values one state, which each query reads."""
    ink, accent = INK[theme], ACCENT[theme]
    figure, axes = plt.subplots(figsize=(8.4, 2.1))
    for name, y in (("queries $q$", 1.9), ("keys $k$", 1.0), ("values $v$", 0.1)):
        box(axes, (0.9, y), name, ink)
    box(axes, (3.3, 1.9), r"features $\phi(q)$", accent, 1.8)
    box(axes, (3.3, 1.0), r"features $\phi(k)$", accent, 1.8)
    box(axes, (6.3, 0.55), r"state $\sum_j \phi(k_j)\,(v_j, 1)$", accent, 2.5)
    box(
        axes,
        (9.6, 1.9),
        r"output $\frac{\phi(q)\,\cdot\,\sum \phi(k)\,v}{\phi(q)\,\cdot\,\sum \phi(k)}$",
        ink,
        2.7,
    )
    for y in (1.9, 1.0):
        arrow(axes, (1.65, y), (2.4, y), ink)
    arrow(axes, (4.2, 1.0), (5.05, 0.7), ink)
    arrow(axes, (1.65, 0.1), (5.05, 0.4), ink)
    arrow(axes, (4.2, 1.9), (8.25, 1.9), ink)
    arrow(axes, (7.55, 0.7), (8.8, 1.55), ink)
    axes.text(
        6.3,
        0.0,
        "$m$ × (width + 1) numbers, whatever the length",
        color=ink,
        ha="center",
        fontsize=8,
    )
    axes.text(
        3.3,
        2.35,
        r"$\phi(q)\cdot\phi(k) \approx e^{q \cdot k}$",
        color=ink,
        ha="center",
        fontsize=9,
    )
    axes.set(xlim=(0, 11.1), ylim=(-0.3, 2.6))
    axes.set_axis_off()
    path = Path(__file__).parent / "_static" / f"idea-{theme}.svg"
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "idea"
    for theme in INK:
        draw(theme)
