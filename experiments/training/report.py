"""The report of a comparison: tables, figures and a verdict that follows the statistics."""

import base64
import html
import io
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from experiments.common import provenance, statistics
from experiments.common.statistics import LEVEL, plus_minus
from experiments.training.ensemble import Ensemble
from experiments.training.in_turn import Finished
from vit import config as configs
from vit import files, report

EFFECT = 0.008
"""The gain in accuracy of PM over ORF in Reid et al. 2025, Table 2."""
DROP = 0.22
"""The dots of the seeds stand so far below their mean, for its interval to leave them free."""


class Result(NamedTuple):
    """A setting and what came of it."""

    coupling: str
    point: str
    """The other values that are compared, in words."""
    config: configs.Config
    trained: Ensemble | Finished
    attention_errors: Sequence[float]
    """Of the first seeds, each the mean over layers and heads."""
    uniform_errors: Sequence[float] = ()
    """What uniform attention, which needs no features, has in the same layers."""
    folder: str = ""
    """Where its runs lie, from the folder of the report."""

    @property
    def accuracy(self) -> dict[int, float]:
        """Of the last evaluation, by seed; without the seeds that diverged."""
        final = self.trained.records[-1].get("eval_accuracy", [])
        runs = zip(self.trained.seeds, final, self.trained.diverged, strict=False)
        return {seed: value for seed, value, step in runs if step is None}


class Comparison(NamedTuple):
    """A setting against the baseline at the same point."""

    result: Result
    baseline: Result
    difference: statistics.Difference
    corrected: float
    """p-value with Holm's correction over all comparisons of the report."""


class Section(NamedTuple):
    """A part of the report."""

    title: str
    texts: list[str]
    table: Sequence[dict[str, str]] = ()
    figure: str = ""
    links: Sequence[str] = ()
    """Where the first cell of each row leads, if anywhere."""


def comparisons(results: Sequence[Result], baseline: str) -> list[Comparison]:
    """Each setting against the baseline of its point; with one coupling, the first point."""
    pairs = []
    for result in results:
        if len({r.coupling for r in results}) > 1:
            same_point = (r for r in results if r.point == result.point)
            other = next(r for r in same_point if r.coupling == baseline)
        else:
            other = results[0]
        if other is not result:
            pairs.append((result, other))
    differences = []
    for result, other in pairs:
        a, b = result.accuracy, other.accuracy
        both = [seed for seed in a if seed in b]
        differences.append(statistics.paired([a[s] for s in both], [b[s] for s in both]))
    corrected = statistics.holm([d.p_value for d in differences])
    return [
        Comparison(result, other, difference, p)
        for (result, other), difference, p in zip(pairs, differences, corrected, strict=True)
    ]


def name(result: Result) -> str:
    """Coupling and point, as in "pm, num_features=32"."""
    return ", ".join(filter(None, [result.coupling, result.point]))


def sentence(comparison: Comparison) -> str:
    """What the seeds say of one difference."""
    d, who = comparison.difference, name(comparison.result)
    other = name(comparison.baseline)
    if d.count < 2 or np.isnan(d.p_value):
        seeds = f"{d.count} seed{'s' * (d.count != 1)} that both finished"
        return f"{who} against {other}: {seeds} cannot show a difference or its absence."
    interval = (
        f"{d.mean:+.4f}, 95% interval {d.low:+.4f} to {d.high:+.4f},"
        f" corrected p = {comparison.corrected:.2g}"
    )
    if comparison.corrected < LEVEL:
        direction = "better" if d.mean > 0 else "worse"
        return f"{who} is {direction} than {other} ({interval})."
    return f"{who} against {other}: no difference that {d.count} seeds can show ({interval})."


def verdict(compared: Sequence[Comparison]) -> str:
    """All of it in a sentence or two."""
    if not compared:
        return "One setting: nothing is compared."
    shown = [c for c in compared if c.corrected < LEVEL]
    counts = {c.difference.count for c in compared}
    seeds = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    total = f"{len(compared)} comparison{'s' * (len(compared) != 1)}"
    if not shown:
        return f"No difference that {seeds} seeds can show, in {total}."
    better = [name(c.result) for c in shown if c.difference.mean > 0]
    worse = [name(c.result) for c in shown if c.difference.mean < 0]
    parts = [f"better than the baseline: {'; '.join(better)}"] if better else []
    parts += [f"worse: {'; '.join(worse)}"] if worse else []
    rest = len(compared) - len(shown)
    others = f" For the other {rest}, no difference that {seeds} seeds can show." if rest else ""
    return f"Of {total} {len(shown)} show a difference. {'. '.join(parts)}.{others}"


def power(comparison: Comparison) -> str:
    """How many seeds the paper's effect would take at the spread that was seen."""
    d = comparison.difference
    if np.isnan(d.p_value):
        return "unknown: no spread was seen"
    needed = statistics.seeds_needed(EFFECT, d.deviation)
    now = statistics.power(EFFECT, d.deviation, d.count)
    return f"{needed} ({d.count} find it in {now:.0%} of cases)"


def rows(results: Sequence[Result], compared: Sequence[Comparison]) -> list[dict[str, str]]:
    """The main table, one row for each setting."""
    by_result = {id(c.result): c for c in compared}
    table = []
    for result in results:
        mean, error = statistics.mean_and_error(list(result.accuracy.values()))
        row = {
            "setting": name(result),
            "seeds": str(len(result.accuracy)),
            "accuracy": plus_minus(mean, error),
        }
        comparison = by_result.get(id(result))
        row["difference to baseline"] = "baseline"
        row["95% interval"] = row["corrected p"] = ""
        if comparison:
            d = comparison.difference
            row["difference to baseline"] = f"{d.mean:+.4f}"
            row["95% interval"] = f"{d.low:+.4f} to {d.high:+.4f}"
            row["corrected p"] = f"{comparison.corrected:.2g}"
        row["attention error"] = _of(result.attention_errors)
        row["of uniform attention"] = _of(result.uniform_errors)
        if result.config.attention.kind == "softmax":
            row["attention error"] = "exact"
        records = result.trained.records
        rate = float(np.median([r["images_per_second"] for r in records]))
        row["seconds, all seeds"] = f"{records[-1]['seconds']:.0f}"
        row["images/s"] = f"{rate:,.0f}"
        temporary = result.trained.temporary_mib
        row["temporary memory, MiB"] = "" if np.isnan(temporary) else f"{temporary:,.1f}"
        row["diverged"] = ", ".join(
            f"seed {seed} at step {step}"
            for seed, step in zip(result.trained.seeds, result.trained.diverged, strict=True)
            if step is not None
        )
        table.append(row)
    if not any(row["diverged"] for row in table):
        for row in table:
            del row["diverged"]
    return table


def write(results: Sequence[Result], contents: dict[str, Any], out: Path) -> str:
    """Writes `report.md`, `report.html`, `results.csv`, `seeds.csv` and figures; returns the first.

    Args:
        results: of all settings.
        contents: config, couplings, seeds, grid and baseline.
        out: the folder.
    """
    compared = comparisons(results, contents["baseline"])
    table = rows(results, compared)
    for path, lines in [("results.csv", table), ("seeds.csv", _runs(results))]:
        report.write_csv(out / path, [list(lines[0]), *(list(line.values()) for line in lines)])
    figures = {"curves": _curves(results)}
    if compared:
        figures["differences"] = _differences(compared)
    needed = [
        {
            "comparison": f"{name(c.result)} against {name(c.baseline)}",
            "standard deviation of the differences": f"{c.difference.deviation:.4f}",
            f"seeds needed for {EFFECT:+.3f}": power(c),
        }
        for c in compared
    ]
    config = configs.from_dict(contents["config"])
    grid = {k: ", ".join(map(str, contents[k])) for k in ("couplings", "seeds", "grid")}
    values = [{"field": k, "value": v} for k, v in grid.items() if v] + [
        {"field": f"config.{k}", "value": str(v)} for k, v in configs.flatten(config).items()
    ]
    differences = Section(
        "Differences",
        ["With 95% intervals, uncorrected; each dot is a seed."],
        figure="differences",
    )
    seeds = Section(
        "How many seeds would be needed",
        [
            f"For {EFFECT:+.3f}, the paper's gain of PM over ORF, to be found in 80% of cases"
            f" by one paired t-test at level {LEVEL}, at the spread seen here."
        ],
        needed,
    )
    versions = [{"what": k, "is": v} for k, v in provenance.machine().items()]
    sections = [
        Section("Verdict", [verdict(compared), *map(sentence, compared)]),
        Section("Results", [_notes(contents)], table, links=[_link(r.folder) for r in results]),
        *([differences] if compared else []),
        Section("Learning curves", ["Means over the seeds, with a standard error."], (), "curves"),
        *([seeds] if compared else []),
        Section("Versions and hardware", [], versions),
        Section("Every value of the config", [], values),
    ]
    for key, figure in figures.items():
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=120)
        files.write(out / f"{key}.png", content.getvalue())
    files.write(out / "report.html", _html(sections, figures))
    for figure in figures.values():
        plt.close(figure)
    markdown = _markdown(sections)
    files.write(out / "report.md", markdown)
    return markdown


def _notes(contents: dict[str, Any]) -> str:
    baseline = f"{contents['baseline']!r} at the same point"
    if len(contents["couplings"]) == 1:
        baseline = "the first point"
    return (
        f"Accuracy on {contents['config']['data']['eval_split']!r}: mean ± standard error."
        f" Differences are paired by seed, to {baseline}; p-values are those of paired t-tests with"
        " Holm's correction. Attention error: of the trained layers, relative to exact attention,"
        " mean over layers and heads of the first seeds; beside it that of uniform attention, which"
        " looks at nothing. A setting leads to its runs."
    )


def _link(folder: str) -> str:
    """An address for a page that lies in the folder of the report."""
    return urllib.parse.quote(f"{folder}/") if folder else ""


def _runs(results: Sequence[Result]) -> list[dict[str, str]]:
    table = []
    for result in results:
        last, trained = result.trained.records[-1], result.trained
        for place, seed in enumerate(trained.seeds):
            row = {"coupling": result.coupling, "point": result.point, "seed": str(seed)}
            for key in ("train_loss", "eval_loss", "eval_accuracy", "eval_top5"):
                row[key] = str(last[key][place]) if key in last else ""
            row["diverged_at_step"] = str(trained.diverged[place] or "")
            table.append(row)
    return table


def _of(sample: Sequence[float]) -> str:
    return statistics.estimate(sample) if sample else ""


def _curves(results: Sequence[Result]) -> Any:
    points = list(dict.fromkeys(result.point for result in results))
    figure, axes = plt.subplots(
        len(points), 2, figsize=(10, 3.6 * len(points)), layout="constrained", squeeze=False
    )
    couplings = list(dict.fromkeys(result.coupling for result in results))
    for result in results:
        color = f"C{couplings.index(result.coupling)}"
        sound = [place for place, step in enumerate(result.trained.diverged) if step is None]
        for axis, key in zip(
            axes[points.index(result.point)], ("train_loss", "eval_accuracy"), strict=True
        ):
            records = [r for r in result.trained.records if key in r]
            if not (sound and records):
                continue
            values = np.asarray([[r[key][place] for place in sound] for r in records], float)
            epochs, mean = [r["epoch"] for r in records], values.mean(axis=1)
            error = values.std(axis=1, ddof=1) / np.sqrt(len(sound)) if len(sound) > 1 else 0 * mean
            style: dict[str, Any] = dict(color=color, label=result.coupling)
            if len(records) == 1:  # a line of one point is none
                place = couplings.index(result.coupling) - (len(couplings) - 1) / 2
                axis.errorbar(epochs[0] + 0.1 * place, mean, error, fmt="o", capsize=3, **style)
                axis.set_xticks(epochs, [f"{epochs[0]:g}"])  # they stand beside each other there
            else:
                axis.plot(epochs, mean, linewidth=1.2, **style)
                band = dict(color=color, alpha=0.2, linewidth=0)
                axis.fill_between(epochs, mean - error, mean + error, **band)
            axis.set(
                xlabel="epoch", ylabel=key.replace("_", " "), title=report.literal(result.point)
            )
            axis.grid(alpha=0.3)
    axes[0][1].legend(fontsize="small")
    return figure


def _differences(compared: Sequence[Comparison]) -> Any:
    height = 1.2 + 0.5 * len(compared)
    figure, axis = plt.subplots(figsize=(8, height), layout="constrained")
    for row, c in enumerate(compared):
        d, a, b = c.difference, c.result.accuracy, c.baseline.accuracy
        dots = [a[s] - b[s] for s in a if s in b]
        axis.plot(dots, [row + DROP] * d.count, "o", color="0.35", alpha=0.6, markersize=4)
        if not np.isnan(d.p_value):
            error = [[d.mean - d.low], [d.high - d.mean]]
            color = "C3" if c.corrected < LEVEL else "C0"
            axis.errorbar([d.mean], [row], xerr=error, fmt="o", color=color, capsize=4)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(compared)), [report.literal(name(c.result)) for c in compared])
    axis.set_ylim(len(compared) - 0.5, -0.5)
    axis.set(xlabel="difference in accuracy to the baseline (red: corrected p < 0.05)")
    axis.grid(alpha=0.3, axis="x")
    return figure


def _markdown(sections: Sequence[Section]) -> str:
    lines = ["# Comparison", ""]
    for title, texts, table, figure, links in sections:
        lines += [f"## {title}", ""]
        lines += [line for text in texts for line in (report.plain(text), "")]
        if table:
            lines += [f"| {' | '.join(table[0])} |", "|---" * len(table[0]) + "|"]
            for row, link in zip(table, links or [""] * len(table), strict=True):
                first, *rest = map(report.plain, row.values())
                lines += [f"| {' | '.join([f'[{first}]({link})' if link else first, *rest])} |"]
            lines += [""]
        if figure:
            lines += [f"![{title}]({figure}.png)", ""]
    return "\n".join(lines)


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 0 auto; padding: 1rem;
  color: #222; background: #fff; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.3rem 0.6rem; border-bottom: 1px solid #ddd;
  white-space: nowrap; vertical-align: top; }
th { border-bottom: 2px solid #888; white-space: normal; min-width: 4rem; }
img { max-width: 100%; height: auto; }
.verdict p:first-of-type { font-weight: 600; font-size: 1.1rem; }
"""


def _cells(row: dict[str, str], link: str) -> str:
    """Of a table; the first one leads to the link."""
    first, *rest = map(html.escape, row.values())
    if link:
        first = f'<a href="{html.escape(link)}">{first}</a>'
    return "".join(f"<td>{cell}</td>" for cell in (first, *rest))


def _html(sections: Sequence[Section], figures: dict[str, Any]) -> str:
    """One file that needs no other; every text is escaped."""
    body = []
    for title, texts, table, figure, links in sections:
        body.append(f'<section class="{html.escape(title.split()[0].lower())}">')
        body.append(f"<h2>{html.escape(title)}</h2>")
        body += [f"<p>{html.escape(text)}</p>" for text in texts]
        if table:
            head = "".join(f"<th>{html.escape(key)}</th>" for key in table[0])
            lines = [
                f"<tr>{_cells(row, link)}</tr>"
                for row, link in zip(table, links or [""] * len(table), strict=True)
            ]
            body.append(f'<div class="table"><table><tr>{head}</tr>{"".join(lines)}</table></div>')
        if figure:
            buffer = io.BytesIO()
            figures[figure].savefig(buffer, format="svg")
            encoded = base64.b64encode(buffer.getvalue()).decode()
            body.append(
                f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{encoded}">'
            )
        body.append("</section>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Comparison</title><style>{STYLE}</style></head>\n"
        f"<body><h1>Comparison</h1>\n{chr(10).join(body)}\n</body></html>\n"
    )
