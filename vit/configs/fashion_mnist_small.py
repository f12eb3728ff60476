"""Fashion-MNIST in 4 x 4 patches: a run of minutes on a CPU.

    performer-vit prepare --source=DIR_OF_IDX_FILES --out=data --name=fashion_mnist
    performer-vit train --config=fashion_mnist_small \\
        --workdir=runs/fashion --config.data.dir=data
"""

from vit.config import Attention, Config, Data, Model, Optim


def get_config() -> Config:
    return Config(
        model=Model(variant="XS/4", pooling="mean"),
        attention=Attention(coupling="pm", num_features=32),
        data=Data(name="fashion_mnist", dir="data", image_size=28, flip=True, batch_size=128),
        optim=Optim(learning_rate=2e-3, warmup_steps=1 / 6),
        num_epochs=3.0,
        log_every=39,
        eval_every=468,
        checkpoint_every=117,
    )
