"""iNaturalist 2021 (10,000 species), a SimRFs-Performer: Reid et al. 2023, Sec. 5.4 and Fig. 9(c).

    performer-vit prepare --source=DIR --out=data --name=inaturalist2021
    performer-vit train --config=inaturalist2021 --workdir=runs/inaturalist
    performer-vit train --config=inaturalist2021 \\
        --workdir=runs/inaturalist_orf --config.attention.coupling=orf

DIR holds the class folders `train/<class>/*.jpg` and `val/<class>/*.jpg` that train.tar.gz and
val.tar.gz of the 2021 competition unpack to. The originals are up to 500 pixels on a side.

The paper: model, optimiser, features and epochs as on ImageNet (see `imagenet_simrf`, also for what
is left open); "10K classes, 2.7M training images, 500K test set". The labels
of that test set are not public: the accuracy here is that on the validation
split, 100,000 images, 10 a class. 300 epochs of 2,686,843 images are 196,500 steps.

Machine: 8 devices with 80 GB; compiled for h100:8 and counted, not run, the step takes 12.4 GiB on
each.

Expected: the paper prints curves only; of this data set it says that SimRF is never worse than ORF.
Not yet run here: it takes accelerators.
"""

from vit.config import Config, bundled, with_values


def get_config() -> Config:
    changes = {"data.name": "inaturalist2021", "eval_every": 5_000}
    changes["optim.warmup_steps"] = 10_000 / 196_500
    return with_values(bundled("imagenet_simrf"), changes)
