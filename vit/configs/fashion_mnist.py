"""Fashion-MNIST in 2 x 2 patches: attention of ImageNet's size on data that anyone can get.

    performer-vit prepare --source=DIR_OF_IDX_FILES --out=data --name=fashion_mnist
    performer-vit train --config=fashion_mnist --workdir=runs/fashion_mnist
    performer-vit train --config=fashion_mnist --workdir=runs/fashion_orf \\
        --config.attention.coupling=orf        # likewise pnc, simrf; --config.seed=1, 2, ...
    performer-vit train --config=fashion_mnist \\
        --workdir=runs/fashion_softmax --config.attention.kind=softmax

28 x 28 pixels are 196 patches and a class token: 197 tokens, head_dim 64, m = 128, 12 layers, as
in ViT-B/16 at 224 x 224; only the width is a quarter (Ti: 192, three heads). Reid et al. 2023,
Sec. 5.4, trains B-sized models on the same data (Fig. 9(b)), with a patch size that it leaves open;
optimiser, augmentation and epochs are ours, the usual ones for a small ViT (5,850 steps).

It needs an accelerator: on one x86-64 core a step with a batch of 16 took 1.7 s in float32 (2 steps
after compilation, synthetic images; 2.8 s in bfloat16), so that a step of 512 would take about a
minute and the run four days. `fashion_mnist_small.py` is the run of minutes on a CPU. Expected: not
known, there is no published figure for this model. Run here for 320 steps of 8 images alone, three
seeds of four kinds of attention: docs/results/training.md.
"""

from vit.config import Attention, Config, Data, Model, Optim


def get_config() -> Config:
    return Config(
        model=Model(variant="Ti/2", dropout=0.1, dtype="bfloat16"),
        attention=Attention(coupling="pm", num_features=128),
        data=Data(
            name="fashion_mnist",
            dir="data",
            image_size=28,
            max_shift=2,
            flip=True,
            batch_size=512,
            num_workers=4,
        ),
        optim=Optim(learning_rate=1e-3, warmup_steps=0.1, weight_decay=0.05, label_smoothing=0.1),
        num_epochs=50.0,
        log_every=39,
        eval_every=585,
        checkpoint_every=585,
    )
