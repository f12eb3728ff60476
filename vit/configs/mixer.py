"""The embedded digits with an MLP-Mixer, without attention: one minute on two CPU cores.

    performer-vit train --config=mixer --workdir=runs/mixer

The head has no token: patches are mixed by MLPs. Accuracy: 0.986 (one run).
"""

from vit.config import Data, Optim
from vit.model.mixer import Config, Model


def get_config() -> Config:
    return Config(
        model=Model(patch_size=2, width=64, depth=4, patch_dim=64, channel_dim=256),
        data=Data(batch_size=64, max_shift=1),
        optim=Optim(learning_rate=2e-3, weight_decay=0.05, label_smoothing=0.1),
        num_epochs=40.0,
    )
