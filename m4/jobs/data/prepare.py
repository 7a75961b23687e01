"""`m4 data prepare`: builds the corpus alone, on a machine without accelerators."""

from m4.experiment import Experiment
from m4.jobs.corpus import opened_or_built, place_of


def prepare(experiment: Experiment, rebuild: bool) -> None:
    """Builds the tokenized corpus in MODEL_DIR/data or Data.data_dir, or checks what is there.

    rebuild: replaces another corpus, for all runs that share it.
    """
    cache = opened_or_built(experiment, rebuild=rebuild)
    pairs = sum(cache.size(language, "train") for language in cache.languages())
    print(
        f"{place_of(experiment)}: {pairs:,} training pairs in {len(cache.languages())} languages, "
        f"corpus {cache.fingerprint[:16]}"
    )
