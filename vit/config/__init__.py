"""Configuration of a run: its fields, their ranges, and the file that stores them.

A config file (`vit/configs/*.py`) defines `get_config() -> Config`. A flag overrides one
field, as in `--config.attention.coupling=pm`. Each field has a help text and a range; `RULES` are
conditions on several fields. `validate` checks all of them before any work starts.

fields  the sections and their fields, and the attention of each block
rules   ranges of fields, conditions on several of them
store   config files and the configs of runs
"""

from vit.config.fields import BLOCKS as BLOCKS
from vit.config.fields import FIELDS as FIELDS
from vit.config.fields import LARGEST as LARGEST
from vit.config.fields import SECTIONS as SECTIONS
from vit.config.fields import SIZES as SIZES
from vit.config.fields import TYPES as TYPES
from vit.config.fields import Attention as Attention
from vit.config.fields import Block as Block
from vit.config.fields import Config as Config
from vit.config.fields import Data as Data
from vit.config.fields import Model as Model
from vit.config.fields import Optim as Optim
from vit.config.fields import Size as Size
from vit.config.fields import blocks as blocks
from vit.config.fields import exact as exact
from vit.config.fields import flatten as flatten
from vit.config.fields import parse_variant as parse_variant
from vit.config.fields import with_values as with_values
from vit.config.rules import RULES as RULES
from vit.config.rules import allowed as allowed
from vit.config.rules import check_fields as check_fields
from vit.config.rules import validate as validate
from vit.config.store import BUNDLED as BUNDLED
from vit.config.store import PLACEMENT as PLACEMENT
from vit.config.store import bundled as bundled
from vit.config.store import bundled_path as bundled_path
from vit.config.store import differences as differences
from vit.config.store import load as load
from vit.config.store import of_run as of_run
from vit.config.store import save as save
