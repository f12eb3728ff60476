"""ImageNet (ILSVRC2012), Reid et al. 2025, Table 2, in the reading of scenic's public ViT config.

    performer-vit prepare --source=DIR_OF_ILSVRC2012_TARS --out=data
    performer-vit train --config=imagenet_scenic --workdir=runs/scenic_orf \\
        --config.attention.coupling=orf        # likewise pm, pnc; --config.seed=1, 2, ...

`imagenet` takes the paper's words as they stand. This one is likelier, for the words fit a file:
`scenic/projects/baselines/configs/imagenet/imagenet_vit_config.py` of google-research/scenic, which
comes from the same group, has all of the paper's numbers (ViT-B/16, base rate 3e-3, "end" rate
1e-5, 10,000 steps of warm-up, 90 epochs, 4096), and its rate is 'compound', the paper's word:
'constant*linear_warmup*cosine_decay' (read in the version of 2024). There "constant" is a factor,
the base rate, not a stretch of time, and optimizer 'adam' with a weight decay is AdamW. The paper
does not say that it used that file. **Train one seed of each, with `orf`, before any grid.**

What it has besides, and this config too:

    rate            the cosine follows the warm-up at once and ends at 0: `cosine_decay` does not
                    read the end rate 1e-5. (An older version has 'linear_decay', which does.)
    weight decay    0.3, decoupled, times the rate; there of all parameters, here of matrices alone
    dropout         0.1, none in attention
    clipping        global norm 1
    loss            one sigmoid for each class, summed over the classes; biases of the head from -10
    head            reads a class token through a layer of width 768 and tanh
    first values    Glorot's in attention and MLP, biases of the MLP from N(0, 1e-6)
    augmentation    a random part of the image, and flips

It computes in float32, this one in bfloat16 (attention's sums, norms and logits in float32).

Left open by either, as it is a config of softmax attention, and chosen as in `imagenet`: one draw
for each head of each layer, or one for all (`share_heads`); redraws (`redraw_every`; never); the
epsilon of the features (none here); antithetic pairs (none). A run in which one of these is what
the paper did not have can miss its figures, with all else right.

Machine: 8 devices with 80 GB, in four parts of 128 images a device: compiled for h100:8 and
counted, not run, the step takes 12.3 GiB on each (docs/howto/large-runs.md). TPU v5e:4x4, sixteen
devices with 16 GB, is too small for four parts: its compiler asks for 19.3 GB.

Expected, if this is what the paper ran: `orf` 0.625 +- 0.003, `pnc` 0.620 +- 0.003, `pm`
0.633 +- 0.003 (Table 2, means of 34 to 48 seeds). Not yet run here: it takes accelerators.
"""

from vit.config import Config, bundled, with_values

MODEL = {"model.dropout": 0.1, "model.pre_logits": True, "model.head_bias": -10.0}
RATE = {"optim.final_learning_rate": 0.0, "optim.constant_steps": 0.0}
OPTIM = {"optim.loss": "sigmoid", "optim.weight_decay": 0.3, "optim.accumulate": 4}


def get_config() -> Config:
    return with_values(bundled("imagenet"), MODEL | RATE | OPTIM)
