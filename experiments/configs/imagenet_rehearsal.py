"""The way of an ImageNet run in small: what `python -m experiments.training.rehearsal` trains.

The data, the commands and all that happens to a run are those of `imagenet`; the model is ViT-B/16
cut to two layers, and there are six steps of 16 pictures. Beside what `imagenet` has it asks for
what the other configs of ImageNet have: mixup, RandAugment, dropout, calibrated attention, and
parameters split over two devices.

    python -m experiments.training.rehearsal --out=results/rehearsal
    python -m vit.train --config=imagenet_rehearsal --workdir=runs/rehearsal \\
        --config.data.dir=results/rehearsal/data       # one of its processes, alone

Machine: a CPU. It says that nothing breaks, and nothing of accuracy.
"""

import dataclasses

from vit import bundled
from vit.config import Config


def get_config() -> Config:
    config = bundled.config("imagenet")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, depth=2, dropout=0.1),
        attention=dataclasses.replace(config.attention, calibration="full"),
        data=dataclasses.replace(
            config.data,
            name="rehearsal",
            eval_split="validation[:40]",
            mixup=0.2,
            randaugment_layers=2,
            randaugment_magnitude=15.0,
            batch_size=16,
        ),
        optim=dataclasses.replace(
            config.optim, warmup_steps=2, constant_steps=0, weight_decay=0.1, accumulate=1
        ),
        num_epochs=6 / 64,
        fsdp=2,
        log_every=1,
        eval_every=6,
        checkpoint_every=2,
    )
