"""iNaturalist 2021 (10,000 species), a SimRFs-Performer: Reid et al. 2023, Sec. 5.4 and Fig. 9(c).

    python -m vit.prepare --source=DIR --out=data --name=inaturalist2021
    python -m vit.train --config=experiments/configs/inaturalist2021.py --workdir=runs/inaturalist
    python -m vit.train --config=experiments/configs/inaturalist2021.py \\
        --workdir=runs/inaturalist_orf --config.attention.coupling=orf

DIR holds the class folders `train/<class>/*.jpg` and `val/<class>/*.jpg` that train.tar.gz and
val.tar.gz of the 2021 competition unpack to. The originals are up to 500 pixels on a side.

The paper: model, optimiser, features and epochs as on ImageNet (see `imagenet_simrf.py`, also for
what is left open); "10K classes, 2.7M training images, 500K test set". The labels of that test set
are not public: the accuracy here is that on the validation split, 100,000 images, 10 a class. 300
epochs of 2,686,843 images are 196,500 steps.

Expected: the paper prints curves only; of this data set it says that SimRF is never worse than ORF.
Not yet run here: it takes accelerators.
"""

from vit.config import Attention, Config, Data, Model, Optim


def get_config() -> Config:
    return Config(
        model=Model(variant="B/16", dropout=0.1, dtype="bfloat16"),
        attention=Attention(coupling="simrf", num_features=130),
        data=Data(
            name="inaturalist2021",
            dir="data",
            eval_split="validation",
            image_size=224,
            eval_resize=256,
            crop="inception",
            flip=True,
            batch_size=4096,
            num_workers=16,
        ),
        optim=Optim(
            learning_rate=3e-3,
            final_learning_rate=1e-5,
            warmup_steps=10_000,
            weight_decay=0.1,
        ),
        num_epochs=300.0,
        log_every=50,
        eval_every=5_000,
        checkpoint_every=500,
    )
