"""The sources of batches.

| value | description |
|---|---|
| `Text` | text files, a tokenizer and a layout: windows, or packed documents |
| `Chats` | chats, rendered by the chat template of a model folder, with loss on the answers alone |
| `Mixture` | several texts, mixed by weight |
| `Images` | labeled images from an .npz file |
| `ImageFolder` | labeled images from the folders of their classes, decoded and augmented by threads |
| `Arrays` | NumPy arrays with the same number of rows |
| `Table` | columns of numbers in .parquet and .arrow files |
| `Rows` | a dataset with `len(rows)` and `rows[i]` |
| `Stream` | an iterable of batches that are ready to use |

An experiment takes a dict of arrays as `Arrays`, and an iterable of batches as `Stream`.

`value.open(batch, seed)` checks the files and returns `Opened`, with `train()`, `evaluation()`, `tokenizer` and
`facts`. `tokenizer.from_json` restores a tokenizer from the text that its `to_json` returned.
"""

from jaxscale.data.chat.chats import Chats
from jaxscale.data.image_folder import ImageFolder
from jaxscale.data.images import Images
from jaxscale.data.loader import Batches, HeldOut, Opened
from jaxscale.data.rows import Arrays, Rows
from jaxscale.data.stream import Stream
from jaxscale.data.table import Table
from jaxscale.data.text import Mixture, Text
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.lazy import suggest_arguments

__all__ = [
    "Arrays",
    "Batches",
    "Chats",
    "HeldOut",
    "ImageFolder",
    "Images",
    "Mixture",
    "Opened",
    "Rows",
    "Stream",
    "Table",
    "Text",
    "Tokenizer",
]

for _source in (Arrays, Chats, ImageFolder, Images, Mixture, Rows, Stream, Table, Text):
    suggest_arguments(_source)
