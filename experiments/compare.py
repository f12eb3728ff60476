"""Compares couplings, or values of any flag, over several seeds; says what the seeds can show.

    python -m experiments.compare --config=digits \\
        --couplings=softmax,orf,simrf,pnc,pm,pm-antithetic --seeds=8 --out=results/digits
    python -m experiments.compare --config=digits --couplings=orf,pm \\
        --grid config.attention.num_features=16,32,64 --seeds=4 --out=results/features

"softmax" stands for exact attention. All settings have the same seeds: seed s means the same
initial parameters, order of the data and dropout in each of them, and only what is compared
differs. The seeds of a setting are trained at once (`experiments.training.ensemble`), each whole on
one device. With --in_turn they are trained one after another, each as `vit.train` does on all
devices: for what does not fit otherwise, as `--dry_run` of vit.train says. On several hosts each
runs the same command with --in_turn --distributed; when all is trained, the same command on one
host, without --distributed, writes the report. The folder receives `report.md`, `report.html` (one
file, with its figures inside), `results.csv` and the runs; the same command goes on where a stopped
one was.

    python -m experiments.compare --runs=runs/orf0,runs/orf1,runs/pm0,runs/pm1 --out=results/mine

reports on any finished runs of vit.train: the fields of their configs that differ, beside the seed,
are what is compared.
"""

import sys
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from experiments.training import comparison
from vit import devices, safety
from vit.arguments import from_flag, parse_flags


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.FATAL)
    out = Path(str(_OUT.value))
    try:
        _JOIN()
        if jax.process_count() > 1 and not _IN_TURN.value:
            raise ValueError("several hosts train the seeds one after another: give --in_turn")
        if _RUNS.value:
            text = comparison.of_runs(list(map(Path, _RUNS.value)), out, _BASELINE.value)
        elif not flags.FLAGS["config"].present:
            raise ValueError("give the --config of what is to be trained, or --runs")
        else:
            text = comparison.compare(
                from_flag(_CONFIG),
                out,
                couplings=_COUPLINGS.value,
                num_seeds=_SEEDS.value,
                grid=_GRID.value,
                baseline=_BASELINE.value,
                one_by_one=_IN_TURN.value,
            )
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint")
        sys.exit(safety.STOPPED)
    print(text)
    if (out / "report.html").exists():
        print(f"The report is {out / 'report.html'}.")


if __name__ == "__main__":
    _CONFIG = config_flags.DEFINE_config_file("config", help_string="file with get_config()")
    _OUT = flags.DEFINE_string("out", "results/compare", "folder of the report and the runs")
    _COUPLINGS = flags.DEFINE_list("couplings", ["orf", "pnc", "pm"], 'names, or "softmax"')
    _SEEDS = flags.DEFINE_integer("seeds", 5, "of each setting")
    _GRID = flags.DEFINE_multi_string("grid", [], "config.FIELD=VALUE,VALUE; may be repeated")
    _BASELINE = flags.DEFINE_string("baseline", "", "coupling that the others are compared with")
    _IN_TURN = flags.DEFINE_bool("in_turn", False, "one seed after another, on all devices")
    _RUNS = flags.DEFINE_list("runs", [], "folders of finished runs to report on, nothing trained")
    _JOIN = devices.define_flags()
    app.run(main, flags_parser=parse_flags)
