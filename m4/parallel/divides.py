"""What a message of a size that does not divide says last."""


def nearest(size: int, parts: int) -> str:
    """The sizes next to `size` that divide by `parts`; below the first one, that one alone."""
    down, up = size // parts * parts, (size // parts + 1) * parts
    return f"the nearest that do are {down} and {up}" if down > 0 else f"the least is {parts}"
