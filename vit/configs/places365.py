"""Places365 (365 scenes), a SimRFs-Performer: Reid et al. 2023, Sec. 5.4 and Fig. 9(d).

    performer-vit prepare --source=DIR --out=data --name=places365
    performer-vit train --config=places365 --workdir=runs/places365
    performer-vit train --config=places365 --workdir=runs/places365_orf \\
        --config.attention.coupling=orf

DIR holds the class folders `train/<class>/*.jpg` and `val/<class>/*.jpg` of Places365-Standard in
its "easyformat" (256 x 256 images, one archive to unpack).

The paper: model, optimiser, features and epochs as on ImageNet (see `imagenet_simrf`, also for what
is left open); "365 classes, 1.8M training images, 328K test set". The labels
of that test set are not public: the accuracy here is that on the validation
split, 36,500 images. 300 epochs of 1,803,460 images are 132,000 steps.

Machine: 8 devices with 80 GB; compiled for h100:8 and counted, not run, the step takes 12.3 GiB on
each.

Expected: the paper prints curves only; of this data set it says that SimRF is never worse than ORF.
Not yet run here: it takes accelerators.
"""

from vit.config import Config, bundled, with_values


def get_config() -> Config:
    changes = {"data.name": "places365", "optim.warmup_steps": 10_000 / 132_000}
    return with_values(bundled("imagenet_simrf"), changes)
