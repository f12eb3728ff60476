"""Data: how a record becomes arrays, data sets by name, and batches.

records  `Dataset`, and the image and label of a record, augmented in training
sets     scikit-learn's digits and the data sets of TFDS, by `config.data`
batches  shuffled batches of training, padded batches of evaluation
"""

from vit.data.batches import batch_bytes as batch_bytes
from vit.data.batches import eval_batches as eval_batches
from vit.data.batches import num_workers as num_workers
from vit.data.batches import train_batches as train_batches
from vit.data.records import Batch as Batch
from vit.data.records import Dataset as Dataset
from vit.data.records import blank_image as blank_image
from vit.data.records import evaluated_pixels as evaluated_pixels
from vit.data.records import fingerprint as fingerprint
from vit.data.records import in_memory as in_memory
from vit.data.records import labelled_image as labelled_image
from vit.data.records import with_classes as with_classes
from vit.data.sets import ARRAYS as ARRAYS
from vit.data.sets import KNOWN as KNOWN
from vit.data.sets import check as check
from vit.data.sets import check_apart as check_apart
from vit.data.sets import load as load
from vit.data.sets import sized as sized
from vit.data.sets import splits as splits
