"""Configuration of a run: its fields, their ranges, and the file that stores them.

A config file (`vit/configs/*.py`) defines `get_config() -> Config`. A flag overrides one
field, as in `--config.attention.coupling=pm`. Each field has a help text and a range. `validate`
checks ranges and conditions on several fields before any work starts.

base       kinds of fields, and the fields of the trainer, which every task has
attention  the section `attention`, and the attention of each block
images     the sections of image classification
rules      ranges of fields, conditions on several of them
tasks      tasks by name, with the classes of their configs
store      config files and the configs of runs
"""

from vit.config.attention import ATTENTION_RULES as ATTENTION_RULES
from vit.config.attention import Attention as Attention
from vit.config.attention import Block as Block
from vit.config.attention import blocks as blocks
from vit.config.attention import check_attention as check_attention
from vit.config.attention import check_new as check_new
from vit.config.attention import exact as exact
from vit.config.base import LARGEST as LARGEST
from vit.config.base import Batches as Batches
from vit.config.base import Optimizer as Optimizer
from vit.config.base import TrainConfig as TrainConfig
from vit.config.base import choice as choice
from vit.config.base import count as count
from vit.config.base import field as field
from vit.config.base import fields as fields
from vit.config.base import flag_types as flag_types
from vit.config.base import flatten as flatten
from vit.config.base import local_fields as local_fields
from vit.config.base import number as number
from vit.config.base import placement as placement
from vit.config.base import records as records
from vit.config.base import sections as sections
from vit.config.base import share as share
from vit.config.base import with_values as with_values
from vit.config.images import DATA_RULES as DATA_RULES
from vit.config.images import SIZES as SIZES
from vit.config.images import Config as Config
from vit.config.images import Data as Data
from vit.config.images import Model as Model
from vit.config.images import Optim as Optim
from vit.config.images import Size as Size
from vit.config.images import parse_variant as parse_variant
from vit.config.rules import allowed as allowed
from vit.config.rules import check_fields as check_fields
from vit.config.rules import hold as hold
from vit.config.rules import validate as validate
from vit.config.store import BUNDLED as BUNDLED
from vit.config.store import bundled as bundled
from vit.config.store import bundled_path as bundled_path
from vit.config.store import differences as differences
from vit.config.store import load as load
from vit.config.store import of_run as of_run
from vit.config.store import save as save
from vit.config.tasks import Definition as Definition
from vit.config.tasks import define as define
from vit.config.tasks import definition as definition
from vit.config.tasks import use as use
