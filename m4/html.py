"""HTML pages from templates that extend `base.html.j2`, and text for pages in Markdown."""

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

Filters = dict[str, Callable[..., Any]]


def render(
    template: Path, filters: Filters | None = None, script: Path | None = None, **data: Any
) -> str:
    """Renders one self-contained page; everything is escaped.

    The page's content security policy forbids requests and all scripts but `script`, which it names
    by its SHA-256. An undefined name in the template is an error, not an empty text.

    Args:
        script: File of optional JavaScript. Defaults to none.
    """
    code = "" if script is None else script.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"; script-src 'sha256-{digest}'" if code else ""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= filters or {}
    return environment.get_template(template.name).render(
        data, script=Markup(code), script_policy=Markup(policy)
    )


def in_markdown(text: str) -> str:
    """Returns any text as one line of Markdown in which nothing is markup."""
    # A single bracket, as in an interval, is no markup.
    marks = r"[\\`*<|~&]|(?<=\])[(:\[]|(?<!\w)_|_(?!\w)|^[#>+-]"
    return re.sub(marks, lambda found: f"\\{found[0]}", " ".join(text.split()))
