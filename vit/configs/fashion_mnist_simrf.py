"""Fashion-MNIST, a SimRFs-Performer: Reid et al. 2023, Sec. 5.4 and Fig. 9(b).

    performer-vit prepare --source=DIR_OF_IDX_FILES --out=data --name=fashion_mnist
    performer-vit train --config=fashion_mnist_simrf --workdir=runs/fashion_simrf
    performer-vit train --config=fashion_mnist_simrf --workdir=runs/fashion_orf \\
        --config.attention.coupling=orf

Stated by the paper: model, optimiser, features and epochs as on ImageNet (see `imagenet_simrf`): 12
layers, 12 heads, mlp_dim 3072, dropout 0.1, weight decay 0.1, batches of 4096, 300 epochs (4,200
steps), 130 random vectors.

Left open, and what was chosen:

    patches, image size           2 x 2 of the 28 x 28 pixels: 197 tokens, as on ImageNet
    learning rate                 as in `imagenet_simrf`, its warm-up the same share of the run
    crops, flips                  flips alone

Machine: 8 devices with 80 GB, in four parts of 128 images a device: compiled for h100:8 and
counted, not run (`--dry_run --topology=h100:8`), the step takes 12.2 GiB on each. A step is 434
TFLOP, the run 1.8 EFLOP: a quarter of an hour on eight H100s at 30% of their peak, by arithmetic.

Expected: the paper prints curves only; of this data set it says that SimRF is never worse than ORF.
Not yet run here: it takes accelerators. `fashion_mnist` is the same with a model of size Ti.
"""

from vit.config import Config, bundled, with_values

DATA = {"data.name": "fashion_mnist", "data.eval_split": "test", "data.image_size": 28}
PLAIN = {"data.eval_resize": 0, "data.crop": "center"}
LENGTH = {"log_every": 14, "checkpoint_every": 140, "eval_every": 420}


def get_config() -> Config:
    changes = {"model.variant": "B/2"} | DATA | PLAIN | LENGTH
    return with_values(bundled("imagenet_simrf"), changes)
