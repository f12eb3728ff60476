"""ImageNet (ILSVRC2012), a SimRFs-Performer: Reid et al. 2023, Sec. 5.4 and Fig. 9(a).

    performer-vit prepare --source=DIR_OF_ILSVRC2012_TARS --out=data
    performer-vit train --config=imagenet_simrf --workdir=runs/simrf
    performer-vit train --config=imagenet_simrf --workdir=runs/orf \\
        --config.attention.coupling=orf

Stated by the paper: a ViT of 12 layers, 12 heads, mlp_dim 3072, dropout 0.1 and no attention
dropout; "the adam optimiser with weight decay equal to 0.1", batches of 4096, 300 epochs (93,600
steps); 130 random vectors, coupled as ORF or as SimRF. Heads have 64 dimensions, so 130 vectors are
two blocks of 64 and one of 2; blocks are independent of one another.

Left open, and what was chosen:

    width, patches, image size    768, 16 x 16, 224: B/16, whose depth, heads and MLP these are
    form of the weight decay      decoupled, on matrices (AdamW)
    learning rate                 3e-3 after 10,000 steps of warm-up, cosine to 1e-5: the rates of
                                  Reid et al. 2025 (`imagenet`), without a constant stretch
    all else                      as in `imagenet`, Glorot's first values of the MLP, draws and the
                                  epsilon among them

Machine: 8 devices with 80 GB, in four parts of 128 images a device: compiled for h100:8 and
counted, not run, the step takes 12.3 GiB on each (docs/howto/imagenet.md). TPU v5e:4x4, sixteen
devices with 16 GB, is too small for four parts: the compiler asks for 19.3 GB for those of
`imagenet_scenic`, which has the same shapes; with `--config.optim.accumulate=8` it takes 14.3 GiB.

Expected: the paper prints curves (Fig. 9) and one figure, that SimRF ends with an accuracy 0.5%
above that of ORF on ImageNet; it gives no accuracies. (Its "100K test set" is not ILSVRC2012's
validation split of 50,000 images, which is used here.) Not yet run here: it takes accelerators.
"""

from vit.config import Config, bundled, with_values

MODEL = {"model.dropout": 0.1, "attention.coupling": "simrf", "attention.num_features": 130}
OPTIM = {"optim.weight_decay": 0.1, "optim.accumulate": 4}
RATE = {"optim.warmup_steps": 10_000 / 93_600, "optim.constant_steps": 0.0}


def get_config() -> Config:
    changes = MODEL | OPTIM | RATE | {"num_epochs": 300.0, "eval_every": 3_000}
    return with_values(bundled("imagenet"), changes)
