"""The sources of batches.

| value | description |
|---|---|
| `Text` | text files, a tokenizer and a layout: windows, or packed documents |
| `Mixture` | several texts, mixed by weight |
| `Images` | labeled images from an .npz file |

`value.open(batch, seed)` checks the files and returns `Opened`, with `train()`, `evaluation()`, `tokenizer` and
`facts`. `tokenizer.from_json` restores a tokenizer from the text that its `to_json` returned.
"""

from jaxscale.data.images import Images
from jaxscale.data.loader import Batches, HeldOut, Opened
from jaxscale.data.text import Mixture, Text
from jaxscale.data.tokenizer import Tokenizer

__all__ = ["Batches", "HeldOut", "Images", "Mixture", "Opened", "Text", "Tokenizer"]
