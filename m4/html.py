"""HTML pages: every template extends `base.html.j2`, which has the head and the common style."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

Filters = dict[str, Callable[..., Any]]


def render(template: Path, filters: Filters | None = None, **data: Any) -> str:
    """One self-contained page: no scripts, no requests (its policy forbids both), all escaped.

    A name that the template lacks is an error, not an empty text.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters or {}
    return environment.get_template(template.name).render(data)
