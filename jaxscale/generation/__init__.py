"""Text generation: sampling of tokens, the compiled programs, long texts decoded in windows, and streaming.

The public names are `Sampling`, `sample` and `generate`, for code that uses nothing else of jaxscale. Each loads on
first use.
"""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

_MODULE_BY_NAME = {
    "Sampling": "jaxscale.generation.sampling",
    "generate": "jaxscale.generation.own_function",
    "sample": "jaxscale.generation.own_function",
}
"""For each public name, the module from which the name loads on first use."""

if TYPE_CHECKING:
    from jaxscale.generation.own_function import generate, sample
    from jaxscale.generation.sampling import Sampling

__all__ = ["Sampling", "generate", "sample"]

__getattr__ = lazy_names(__name__, _MODULE_BY_NAME)
