"""Where batches come from.

| value | is |
|---|---|
| `Text` | text files, a tokenizer and a layout: windows, or packed documents |
| `Mixture` | several texts in given shares |
| `Images` | labelled images of an .npz file |

`value.open(batch, seed)` checks the files and returns `Opened`: `train()`, `evaluation()`, `tokenizer`, `facts`.
`tokenizer.from_json` rebuilds a tokenizer from the text of its `to_json`.
"""

from jaxscale.data.images import Images
from jaxscale.data.loader import Batches, HeldOut, Opened
from jaxscale.data.text import Mixture, Text
from jaxscale.data.tokenizer import Tokenizer

__all__ = ["Batches", "HeldOut", "Images", "Mixture", "Opened", "Text", "Tokenizer"]
