"""The jobs of `m4 data ...`: they look at the corpus, train nothing and start no accelerator.

Each takes a `Setup` and, by name, the options that its line in `m4.__main__.DATA_JOBS` declares.
"""

from rich.table import Table

from m4.data.languages import describe
from m4.data.preprocess import split_direction
from m4.experiment import Setup, console, corpus


def preview(setup: Setup) -> None:
    """How often each direction is drawn: pairs and share of the stream."""
    cache = corpus(setup)
    sizes = cache.sizes()
    rates = setup.sampler(sizes)
    table = Table("direction", "language", "pairs", "share")
    for direction, share in rates.items():
        source, target = split_direction(direction)
        name = describe(target if source == "en" else source).name
        table.add_row(direction, name, f"{sizes[direction]:,}", f"{share:.2%}")
    console().print(table)
