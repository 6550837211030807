"""A cache of compiled programs, for tests that compile the same tiny ones."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Programs compiled meanwhile are kept in a folder, and not compiled again, but those that could then hang."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    from jaxscale.compiler.kept_programs import keep_ordered_programs

    keep_ordered_programs()

    wanted: dict[str, Any] = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}

    def take(given: dict[str, Any]) -> None:
        for name, value in given.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX asks once whether there is one, and other tests have compiled before

    take(wanted)
    try:
        yield
    finally:
        take(before)
