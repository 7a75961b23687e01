"""The gin file of `m4 new --start`: it continues from a model on the same dev and test sets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from m4.data.cache.cache import Cache
from m4.data.directions import is_held_out, key_of, languages_of, pair_of
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.jobs.checkpoints.pretrained import Beginning, beginning
from m4.storage import run_folder
from m4.storage.local_copy import fetched

_TEMPLATE = Path(__file__).with_name("continued.gin.template")
_IMPORTS = [
    f"from m4{room} import {name}"
    for room, names in {
        "": "experiment",
        ".data": "corpus",
        ".data.samplers": "temperature",
        ".model": "transformer",
        ".parallel": "mesh",
        ".train": "early_stopping optimizer schedules",
    }.items()
    for name in names.split()
]
# Of dev sentences that are translated greedily at each evaluation, in all directions.
_DEV_SENTENCES = 1600
# The rate at width 128 that was best for continuing models of m4: a seventh of that from scratch,
# for which wider models need less, too (results/starts).
_RATE = 1.0e-3
# The share of old text that gained most and forgot least in results/starts. It needed five times
# the steps of a share of 0.3, which are still fewer than those from scratch.
_KEEP_SHARE = 0.9


class Start(NamedTuple):
    """A model to continue from."""

    folder: Path  # a run of m4, or a model in Hugging Face's layout
    vocabulary: Vocabulary  # of its sources
    corpus: Path | None  # the run's, where it is there
    decoding: Mapping[str, Any]  # the settings with which the run has translated
    languages: Sequence[str]  # of the corpus, with test sentences, as in CorpusSpec.languages

    @property
    def run(self) -> bool:
        """True for a run of m4."""
        return (self.folder / "run.json").is_file()


def opened(place: str) -> Start:
    """Returns the model to continue from. InputError: m4 cannot begin from the folder."""
    folder = fetched(place)
    vocabulary = beginning(folder).vocabulary
    if not (folder / "run.json").is_file():
        return Start(folder, vocabulary, None, {}, [])
    record = run_folder.read(folder)
    data_dir = record["config"].get("experiment.Data.data_dir", "None").strip("'\"")
    root = folder / "data" if data_dir == "None" else Path(data_dir)
    corpus = root / Cache(folder / run_folder.VOCABULARY).fingerprint
    if not (corpus / "manifest.json").is_file():
        return Start(folder, vocabulary, None, record["decoding"], [])
    cache = Cache(corpus)
    tested = [key_of(pair) for pair in cache.language_pairs()
              if cache.size(pair, "test") and is_held_out(pair)]  # fmt: skip
    return Start(folder, vocabulary, corpus, record["decoding"], tested)


def text(
    start: Start,
    values: Mapping[str, Any],
    languages: Sequence[str],
    source: Sequence[str],
    module: str,
) -> str:
    """Returns the gin file."""
    codes = languages_of(map(pair_of, languages))
    begun = beginning(start.folder, [code for code in codes if code != "en"])
    kept = [code for code in start.languages if code not in languages]
    imports = {*_IMPORTS, *begun.imports, f"from m4.data.sources import {module}"}
    if kept:
        first, *rest = source
        of = first.rpartition(" = ")[2]
        source = ["corpus.CorpusSpec.source = @joined.Joined", f"joined.Joined.source = {of}",
                  f"joined.Joined.corpus = {str(start.corpus)!r}", *rest,
                  "experiment.Data.keep = %KEEP",
                  "experiment.Data.keep_share = %KEEP_SHARE"]  # fmt: skip
        imports.add("from m4.data.sources import joined")
    directions = 2 * len(languages)
    optimizer = _optimizer(begun) if start.run else []
    imports |= {"from m4.train import average"} if optimizer else set()
    own = ("transformer.Transformer.dropout_rate", "experiment.Training.optimizer")
    settings = [line for line in begun.settings if not line.startswith(own[: 1 + start.run])]
    rate = _RATE * (128 / begun.width) ** 0.5 if start.run else 1e-3
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        values,
        head="\n".join([f"# continues from {start.folder}", *begun.about]),
        imports="\n".join(sorted(imports)),
        languages=listed([*languages, *kept]),
        keep=f"KEEP = [  # what the model must not forget\n{listed(kept)}\n]\n"
        f"KEEP_SHARE = {_KEEP_SHARE}  # of the draws; 0: only to see what is forgotten"
        if kept
        else "# experiment.Data.keep: old languages, to see what is forgotten (docs/initial.md)",
        source="\n".join(source),
        settings="\n".join(settings),
        steps=2 * values["steps"],
        dev_period=max(20, values["steps"] // 10),
        dev_pairs=max(20, min(200, _DEV_SENTENCES // directions)),
        rate=f"{rate:.1e}",
        why="of results/starts" if start.run else "as T5 is fine-tuned",
        optimizer="\n".join(optimizer),
    )


def _optimizer(begun: Beginning) -> list[str]:
    """Returns the lines of m4's own optimizer, as a config from scratch has it."""
    experts = any(line.startswith("moe.MoeLayer.") for line in begun.settings)
    return [
        *(["experiment.Training.router_z_loss_factor = 1.0e-3"] if experts else []),
        "experiment.Training.optimizer = @average.averaged",
        "average.averaged.optimizer = @optimizer.muon",
        "optimizer.muon.schedule = @schedules.rsqrt",
        "optimizer.muon.matrix_rate = 4.0",
        *(["optimizer.muon.experts = True"] if experts else []),
    ]


def listed(codes: Sequence[str]) -> str:
    """Returns lines of twelve codes each, for a list in gin."""
    rows = (codes[at : at + 12] for at in range(0, len(codes), 12))
    return "\n".join("    " + " ".join(f"{code!r}," for code in row) for row in rows)
