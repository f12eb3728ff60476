"""A language model of characters: four blocks of width 128, on windows of 512 characters of a text.

    python -m experiments.language_model train --config=experiments/language_model/config.py \\
        --workdir=runs/lm --config.data.text=FILE

Without a text it learns the help topics that come with Python, in 30 epochs of about 50 steps.
Attention is exact; a window of exact keys with features for the others is

    --config.attention.kind=performer --config.attention.num_features=64 \\
        --config.attention.exact_window=16
"""

from experiments.language_model.task import Config, Data
from vit.config import Attention, Optimizer


def get_config() -> Config:
    return Config(
        attention=Attention(kind="softmax"),
        data=Data(batch_size=16),
        optim=Optimizer(
            learning_rate=3e-3,
            final_learning_rate=3e-4,
            warmup_steps=0.07,
            b2=0.99,
            weight_decay=0.1,
        ),
        num_epochs=30.0,
        log_every=50,
        eval_every=500,
        checkpoint_every=250,
    )
