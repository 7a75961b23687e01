"""Which sizes divide into equal parts, for messages; without JAX."""


def nearest_valid(size: int, parts: int) -> str:
    """The sizes next to `size` that divide by `parts`; below the first one, that one alone."""
    down, up = size // parts * parts, (size // parts + 1) * parts
    return f"nearest valid sizes: {down} and {up}" if down > 0 else f"nearest valid size: {parts}"
