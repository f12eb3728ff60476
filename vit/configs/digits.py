"""scikit-learn's digits (1,797 images of 8 x 8): a run that takes a minute.

performer-vit train --config=digits --workdir=runs/digits
"""

from vit.config import Attention, Config, Data, Model, Optim


def get_config() -> Config:
    return Config(
        model=Model(variant="XS/2", pooling="mean", dropout=0.1),
        attention=Attention(num_features=32),
        data=Data(name="digits", image_size=8, batch_size=32),
        optim=Optim(learning_rate=4e-3, warmup_steps=0.075, weight_decay=0.05, label_smoothing=0.1),
        num_epochs=40.0,
        log_every=20,
        eval_every=220,
        checkpoint_every=220,
    )
