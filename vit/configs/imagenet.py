"""ImageNet (ILSVRC2012) with ViT-B/16 on three couplings: Reid et al. 2025, Table 2 and App. B.3.

    performer-vit prepare --source=DIR_OF_ILSVRC2012_TARS --out=data
    performer-vit train --config=imagenet --workdir=runs/imagenet_pm
    performer-vit train --config=imagenet --workdir=runs/imagenet_orf \\
        --config.attention.coupling=orf        # likewise pnc; --config.seed=1, 2, ...

This is the paper's words taken as they stand. `imagenet_scenic` is the other reading, and the
likelier one; that file says why. **Train one seed of each, with `orf`, before any grid**: the paper
has 0.625 for it, and the reading that comes near is the one to spend 100 runs on.

Stated by the paper: 12 layers, 12 heads, width 768, MLP 3072, 16 x 16 patches, m = 128 features,
Adam for 90 epochs of batches of 4096 (28,080 steps), "a compound learning rate (10^4 steps linear
warmup, constant, then cosine decay, with base LR 3e-3 and final LR 1e-5)".

Left open, and what was chosen:

    weight decay, dropout            none: "the Adam optimiser"
    length of the constant stretch   4,040 steps, so that the cosine takes the second half
    loss                             cross entropy of a softmax
    clipping                         global norm 1
    augmentation                     a random part of the image (Szegedy et al. 2015) and flips
    pooling, positions               class token; learned
    first values of the MLP          Glorot's, as in the public code of ViTs (`model.mlp_init`)
    evaluation                       shorter side to 256, the centre 224 x 224; 50,000 images
    arithmetic                       bfloat16 (attention's sums, norms and logits in float32)
    draws                            one for each head of each layer (or one for all: `share_heads`)
    redrawing of the frequencies     never (`redraw_every`)
    epsilon of the features          none; public Performers add one (1e-6 to 1e-4)
    antithetic pairs                 none: the three couplings as the paper defines them

Machine: TPU v5e:4x4, sixteen devices with 16 GB: compiled for it and counted, not run, the step in
two parts takes 7.7 GiB on each. By arithmetic 8 devices with 80 GB as well: 256 images a device,
193 MiB each, 52 GB and 2 of parameters and moments (docs/howto/large-runs.md).

Expected (Table 2, test accuracy; means of 34 to 48 seeds each): `orf` 0.625 +- 0.003, `pnc`
0.620 +- 0.003, `pm` 0.633 +- 0.003. Not yet run here: it takes accelerators.
"""

from vit.config import Attention, Config, Data, Model, Optim


def get_config() -> Config:
    return Config(
        model=Model(variant="B/16", dtype="bfloat16", mlp_init="xavier_uniform"),
        attention=Attention(coupling="pm", num_features=128),
        data=Data(
            name="imagenet2012",
            dir="data",
            eval_split="validation",
            image_size=224,
            eval_resize=256,
            crop="inception",
            flip=True,
            batch_size=4096,
            num_workers=-1,
        ),
        optim=Optim(
            learning_rate=3e-3,
            final_learning_rate=1e-5,
            warmup_steps=10_000 / 28_080,  # shares of the run
            constant_steps=4_040 / 28_080,
            weight_decay=0.0,
            accumulate=2,
        ),
        num_epochs=90.0,
        log_every=50,
        eval_every=1_500,
        checkpoint_every=500,
    )
