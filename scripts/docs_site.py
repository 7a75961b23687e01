"""Hooks of mkdocs.yml, for the parts of the site besides the pages of docs/.

- README.md is the first page; the other documents of the root are pages too.
- A link to a file outside docs/ leads to a page with that file, so that it works in the site as it
  does where the repository is read.
- Notebooks, docs/notebooks/*.py in jupytext's percent format, are executed and shown with what
  their cells print and draw. NOTEBOOKS=0 in the environment shows them without.
- The reference of settings comes from annotations, that of commands from their helps, that of
  Python from docstrings.
"""

# pyright: reportMissingImports=false
import base64
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import os
import pkgutil
import posixpath
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jupytext
import nbclient
from jupyter_client.manager import KernelManager
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Documents of the root, and their addresses in the site.
DOCUMENTS = {
    "README.md": "index.md",
    **{f"{name}.md": f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")},
}
# Rooms of m4/ with a page of their own in the reference; jobs and the command line are commands.
ROOMS = ("data", "model", "train", "eval", "plan", "parallel", "storage", "config")
FILES = ("api", "experiment", "build", "settings")  # the rooms that are one file, on the first page
LANGUAGES = {".py": "python", ".gin": "python", ".toml": "toml", ".yml": "yaml", ".cff": "yaml"}
PICTURES = (".png", ".svg")

# Code, which has no links: fenced blocks, and code within a line.
_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")
_MARK = re.compile(r"^ *<!-- test: .*-->\n", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and pictures that are not in docs/."""
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    texts |= {uri: (ROOT / path).read_text("utf-8") for path, uri in DOCUMENTS.items()}
    made: dict[str, str | bytes] = {uri: texts[uri] for uri in DOCUMENTS.values()}
    for file in [*files]:
        if file.src_uri.startswith("notebooks/") and file.src_uri.endswith(".py"):
            files.remove(file)
            uri = f"{file.src_uri[:-3]}.md"
            made |= notebook(Path(str(file.abs_src_path)), uri)
            texts[uri] = str(made[uri])
    waiting = [*texts]
    while waiting:
        uri = waiting.pop()
        for path in links(texts[uri], uri):
            to = address(path)
            if path.startswith("docs/") or to in made or not (ROOT / path).is_file():
                continue  # what is not there is an error of mkdocs
            if path.endswith(PICTURES):
                made[to] = (ROOT / path).read_bytes()
                continue
            made[to] = texts[to] = shown_file(path)
            waiting.append(to)
    made["settings.md"] = "".join(settings_page())
    made["commands.md"] = "".join(commands_page())
    made |= {f"api/{room}.md": "".join(api_page(room)) for room in ("m4", *ROOMS)}
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to the site's pages, and leaves out the tests' marks."""
    del config, files
    uri = page.file.src_uri

    def led(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home(uri)), match[1]))
        return posixpath.relpath(address(path), posixpath.dirname(uri) or ".")

    parts = _CODE.split(_MARK.sub("", markdown))
    parts[::2] = [_LINK.sub(led, part) for part in parts[::2]]
    parts[1::2] = [part.replace("```gin", "```python", 1) for part in parts[1::2]]
    return "".join(parts)


def home(uri: str) -> str:
    """Returns the file in the repository that a page of the site shows."""
    for path, at in DOCUMENTS.items():
        if uri == at:
            return path
    inside = ROOT / "docs" / uri
    return f"docs/{uri}" if inside.parent.is_dir() else uri


def address(path: str) -> str:
    """Returns the page, or the picture, of the site that shows a file of the repository."""
    if path in DOCUMENTS:
        return DOCUMENTS[path]
    if path.startswith("docs/"):
        return re.sub(r"^docs/(notebooks/\w+)\.py$", r"\1.md", path).removeprefix("docs/")
    return path if path.endswith((".md", *PICTURES)) else f"{path}.md"


def links(text: str, uri: str) -> Iterator[str]:
    """Yields the files of the repository that a page's text links to."""
    for part in _CODE.split(text)[::2]:
        for target in _LINK.findall(part):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(home(uri)), target))


def shown_file(path: str) -> str:
    """Returns a page with a file of the repository; Markdown is the page itself."""
    text = (ROOT / path).read_text("utf-8")
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(Path(path).suffix, "text")
    front = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
    return f"{front}# {path}\n\n`````{language}\n{text}`````\n"


def notebook(path: Path, uri: str) -> dict[str, str | bytes]:
    """Executes a notebook.

    Returns:
        Address -> content: the page at `uri`, and its pictures.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell fails.
    """
    book = jupytext.read(path)
    if os.environ.get("NOTEBOOKS") != "0":
        execute(book)
    stem, made = uri.removesuffix(".md"), {}
    parts, heading = [], ""
    for cell in book.cells:
        if cell.cell_type != "code":
            parts.append(cell.source)
            heading = (re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE) or [heading])[-1]
            continue
        parts.append(f"```python\n{cell.source}\n```")
        printed = "".join(o["text"] for o in cell.get("outputs", ()) if o.get("name") == "stdout")
        # Without colours, and without what a progress bar has overwritten.
        if printed := re.sub(r"\x1b\[[\d;]*m|[^\n]*\r(?=[^\n])", "", printed).strip():
            parts.append(f"```text\n{printed}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/svg+xml" in data or "image/png" in data:
                drawn = data.get("image/svg+xml")
                suffix = "png" if drawn is None else "svg"
                picture = f"{stem}_{len(made) + 1}.{suffix}"
                made[picture] = base64.b64decode(data["image/png"]) if drawn is None else drawn
                parts.append(f"![{heading}]({posixpath.basename(picture)})")
            elif "text/html" in data:
                parts.append(data["text/html"])
            elif "text/plain" in data:
                parts.append(f"```text\n{data['text/plain']}\n```")
    return {uri: "\n\n".join(parts), **made}


def execute(book: Any) -> None:
    """Executes a notebook in this environment, in the repository's folder; pictures are SVG."""
    nbclient.NotebookClient(
        book,
        km=KernelManager(kernel_name="python3", transport="ipc"),
        timeout=1800,  # seconds of a cell
        resources={"metadata": {"path": str(ROOT)}},
        extra_arguments=["--InlineBackend.figure_formats=svg"],
    ).execute()


def settings_page() -> Iterator[str]:
    """Yields the reference of settings."""
    from m4.config import canonical_name

    yield (
        "# Settings\n\nEach setting with its name in a config, its default, and what it may be. "
        "**Yes** in the last column: it [may change](run_folder.md#which-settings-may-change) in a "
        "folder where a model is trained, and so may all settings of what it refers to. "
        "A name in front says whose setting it is: `bilingual/` those of bilingual baselines, "
        "`decoder/moe.MoeLayer` those of the decoder's experts.\n"
    )
    for room, parts in configurables().items():
        yield f"\n## {room}\n"
        bare = []
        for part in sorted(parts, key=canonical_name):
            rows = [*setting_rows(part)]
            if not rows:
                bare.append(f"`{canonical_name(part)}`")
                continue
            yield f"\n### {canonical_name(part)}\n\n{first_line(part)}\n\n"
            yield "| setting | default | allowed | meaning | may change |\n"
            yield "| --- | --- | --- | --- | --- |\n"
            yield from rows
        if bare:
            yield f"\nWithout settings: {', '.join(bare)}.\n"


def configurables() -> dict[str, list[Callable[..., Any]]]:
    """Returns everything that a config may name, by room."""
    import m4
    from m4 import settings
    from m4.data.stream.stream import Stream

    found: dict[str, list[Callable[..., Any]]] = {}
    for module in pkgutil.walk_packages(m4.__path__, "m4."):
        if module.name in ("m4.__main__", "m4.data.tasks"):  # which imports TensorFlow
            continue
        for one in vars(importlib.import_module(module.name)).values():
            ours = getattr(one, "__module__", None) == module.name
            if ours and (settings.is_checked(one) or one is Stream):
                found.setdefault(module.name.split(".")[1], []).append(one)
    return found


def setting_rows(part: Callable[..., Any]) -> Iterator[str]:
    """Yields a row for each setting, without parameters that m4 itself gives."""
    from m4 import settings
    from m4.config import parameters_of

    annotations, texts = settings.annotations_of(part), described(part)
    mutable = settings.mutable_of(part)
    for name, parameter in parameters_of(part).items():
        empty = parameter.default is parameter.empty
        given = empty and not isinstance(part, type) and parameter.kind != parameter.KEYWORD_ONLY
        if given or settings.given_of(part, name) or name not in annotations:
            continue
        cells = [
            f"`{name}`",
            "**none**" if empty else f"`{written(parameter.default)}`",
            settings.describe(annotations[name]),
            texts.get(name, ""),
            "yes" if name in mutable else "",
        ]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def written(value: Any) -> str:
    """Returns a default as a config has it."""
    from m4.config import canonical_name

    if isinstance(value, functools.partial):
        return f"@{canonical_name(value.func)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"@{canonical_name(type(value))}()"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(written, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key!r}: {written(one)}" for key, one in value.items())
        return "{" + inner + "}"
    return f"@{canonical_name(value)}" if callable(value) else repr(value)


def first_line(part: Callable[..., Any]) -> str:
    """Returns the first line of a docstring."""
    return (inspect.getdoc(part) or "").split("\n")[0]


def described(part: Callable[..., Any]) -> dict[str, str]:
    """Returns name -> its entry in Args or Attributes, for a class also from its bases."""
    docs = [inspect.getdoc(one) or "" for one in reversed(getattr(part, "__mro__", (part,)))]
    if isinstance(part, type) and not dataclasses.is_dataclass(part):
        docs.append(inspect.getdoc(part.__init__) or "")
    entry = r"[a-z]\w*(?:, [a-z]\w*)*: "
    found = {}
    for doc in docs:
        for section in re.findall(r"^(?:Args|Attributes):\n((?: .*\n?|\n)*)", doc, re.MULTILINE):
            for names, text in re.findall(
                r"^    ([\w, ]+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE
            ):
                # Short entries share a line: "batch_size: packed rows a step. mesh: ..."
                first, *more = re.split(rf"(?<=\.) (?={entry})", " ".join(text.split()))
                for each, said in [(names, first), *(one.split(": ", 1) for one in more)]:
                    found |= {name: f"{said[0].upper()}{said[1:]}" for name in each.split(", ")}
    return found


def commands_page() -> Iterator[str]:
    """Yields the help of every command."""
    from m4.cli import main

    names = [name for name in main.COMMANDS if name != "data"]
    yield "# Commands\n\n`m4 COMMAND --help` prints the same.\n"
    for name in (*names, *(f"data {name}" for name in main.DATA_COMMANDS)):
        printed = io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["m4"]),
            mock.patch.dict(os.environ, {"COLUMNS": "90", "NO_COLOR": "1"}),
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
        ):
            main.parse([*name.split(), "--help"])
        yield f"\n## m4 {name}\n\n```text\n{printed.getvalue()}```\n"


def api_page(room: str) -> Iterator[str]:
    """Yields the reference of one room: a directive of mkdocstrings for each module."""
    import m4

    if room == "m4":
        parts = {name: getattr(m4, name) for name in m4.__all__[2:]}
        named = (f"[`{n}`][{part.__module__}.{n}]" for n, part in parts.items())
        yield f"# m4\n\n`import m4` offers `train` and {', '.join(named)}.\n\n## m4.train\n\n"
        # Where the code is read only, a package of the same name is in its place.
        signature = str(inspect.signature(m4.train)).replace("'", "")
        yield f"```python\ntrain{signature}\n```\n\n```text\n{inspect.getdoc(m4.train)}\n```\n"
        yield from (f"\n::: m4.{name}\n" for name in FILES)
        return
    yield f"---\ntitle: m4.{room}\n---\n\n"
    folder = ROOT / "m4" / room
    for path in [folder / "__init__.py", *sorted(folder.rglob("[!_]*.py"))]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        level = 1 if path.parent == folder and path.name == "__init__.py" else 2
        yield f"\n::: {module}\n    options: {{heading_level: {level}}}\n"


def on_startup(command: str, dirty: bool) -> None:
    """Makes m4 importable where mkdocs was started elsewhere; its warnings are not the site's."""
    del command, dirty
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
