"""Train couplings, or values of any flag, with several seeds, and test the differences.

    python -m experiments.compare --config=digits \\
        --couplings=softmax,orf,simrf,pnc,pm,pm-antithetic --seeds=8 --out=results/digits
    python -m experiments.compare --config=digits --couplings=orf,pm \\
        --grid config.attention.num_features=16,32,64 --seeds=4 --out=results/features

"softmax" stands for exact attention. All settings have the same seeds: seed s means the same
initial parameters, order of the data and dropout in each of them. The runs are trained one after
another, each as `vit.train` does on all devices; programs are compiled once for all seeds of a
setting. The folder receives `report.md`, `results` and `curves` (csv, png), `seeds.csv` and the
runs. The same command resumes a stopped comparison; more seeds, couplings or values can be added.

On several hosts each runs the same command with --distributed. When all runs are trained, the same
command on one host, without --distributed, writes the report.

    python -m experiments.compare --runs=runs/orf0,runs/orf1,runs/pm0,runs/pm1 --out=results/mine

reports on finished runs of vit.train. It compares the fields in which their configs differ, except
the seed.
"""

from pathlib import Path

from absl import flags, logging

from experiments.training import comparison
from vit.config.arguments import chosen_config, define_config, launch
from vit.run import devices


def main(_: list[str]) -> None:
    """Run the command line."""
    logging.set_verbosity(logging.FATAL)
    out = Path(str(_OUT.value))
    _JOIN()
    if _RUNS.value:
        text = comparison.of_runs(list(map(Path, _RUNS.value)), out, _BASELINE.value)
    elif config := chosen_config():
        text = comparison.compare(
            config,
            out,
            couplings=_COUPLINGS.value,
            num_seeds=_SEEDS.value,
            grid=_GRID.value,
            baseline=_BASELINE.value,
        )
    else:
        raise ValueError("--config or --runs is required")
    print(text)
    if (out / "report.md").exists():
        print(f"The report is {out / 'report.md'}.")


if __name__ == "__main__":
    define_config("bundled config or file with get_config()")
    _OUT = flags.DEFINE_string("out", "results/compare", "folder of the report and the runs")
    _COUPLINGS = flags.DEFINE_list("couplings", ["orf", "pnc", "pm"], 'names, or "softmax"')
    _SEEDS = flags.DEFINE_integer("seeds", 5, "number of seeds of each setting")
    _GRID = flags.DEFINE_multi_string("grid", [], "config.FIELD=VALUE,VALUE; may be repeated")
    _BASELINE = flags.DEFINE_string("baseline", "", "coupling that the others are compared with")
    _RUNS = flags.DEFINE_list("runs", [], "folders of finished runs to report on; trains nothing")
    _JOIN = devices.define_flags()
    launch(main)
