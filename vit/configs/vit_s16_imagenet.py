"""ImageNet (ILSVRC2012) with ViT-S/16: the run that everyone knows (Beyer et al. 2022).

    performer-vit prepare --source=DIR_OF_ILSVRC2012_TARS --out=data
    performer-vit train --config=vit_s16_imagenet --workdir=runs/s16
    performer-vit train --config=vit_s16_imagenet --workdir=runs/s16_performer \\
        --config.attention.kind=performer      # the twin: m = 128, pm-antithetic

A check of the whole way before dearer runs: softmax attention must come near a published figure.
`big_vision/configs/vit_s16_i1k.py` of google-research/big_vision gives 76.5% on the validation
split after 90 epochs, in 6 to 7 hours on a TPU v3-8. Theirs, and this config's:

    model           S/16, mean over patches, fixed positions, a layer and tanh before the head,
                    Glorot's first values, head from 0
    data            99% of the training split, batches of 1,024; evaluated on the validation split
    rate            1e-3 after 10,000 steps of warm-up, cosine to 0; gradients clipped at norm 1
    weight decay    their 1e-4 is multiplied by the schedule alone, ours by the rate: 1e-4 / 1e-3
    mixup           0.2
    RandAugment     two operations of magnitude 10 of 10, which is 30 of 30 here

What differs: their RandAugment has "cutout" and "solarize_add" besides and no "identity", its
colour, contrast, brightness and sharpness only rise, and its "solarize" does nothing at 10, where
ours inverts the image; Adam's first moment is bfloat16 there and float32 here; arithmetic is
bfloat16 here. That may cost some tenths of a percent; one percent would be a fault to look for.

Machine: TPU v5e:2x4, eight devices with 16 GB: compiled for it and counted, not run, the step takes
2.6 GiB on each, and memory traffic alone would allow 13,400 images a second. For a CPU, which keeps
more in float32, it was 8 GB (docs/howto/large-runs.md).

Expected: 0.765 with softmax (their docstring). With random features nothing is published; the
paper's B/16 on m = 128 has 0.62 to 0.63 (see `imagenet`). Not yet run here: it takes accelerators.
"""

from vit.config import Config, bundled, with_values

MODEL = {
    "model.variant": "S/16",
    "model.pooling": "mean",
    "model.position": "sincos",
    "model.pre_logits": True,
}
ATTENTION = {"attention.kind": "softmax", "attention.coupling": "pm-antithetic"}
DATA = {"data.train_split": "train[:99%]", "data.batch_size": 1024, "data.mixup": 0.2}
RANDAUGMENT = {"data.randaugment_layers": 2, "data.randaugment_magnitude": 30.0}
OPTIM = {
    "optim.learning_rate": 1e-3,
    "optim.final_learning_rate": 0.0,
    "optim.warmup_steps": 10_000 / 112_590,
    "optim.constant_steps": 0.0,
    "optim.weight_decay": 0.1,
}


def get_config() -> Config:
    changes = MODEL | ATTENTION | DATA | RANDAUGMENT | OPTIM | {"eval_every": 2_500}
    return with_values(bundled("imagenet"), changes)
