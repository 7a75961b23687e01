# ---
# jupyter:
#   # A notebook as text: VS Code opens it, and Jupyter with jupytext; `make docs` shows it with its results.
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Your corpus, from folder to ΔBLEU
#
# This notebook takes a folder of sentence pairs to a trained model, and to what the shared model gains against bilingual ones. It is
# small enough for minutes of one core; with your own folder the same commands train for an hour.
#
# ## The folder
#
# One pair a line, `english<TAB>translation`, one file for each language and split. The text here is made from Unicode CLDR: Spanish
# with 1,500 pairs, its relatives Portuguese with 600 and Galician with 200. Put your own files in place of these
# ([other formats](../data.md#sources-of-files)).

# %%
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from m4.data.sources.cldr import Cldr

here = Path(tempfile.mkdtemp())
corpus = here / "my_corpus"
corpus.mkdir()
source = Cldr({"es": 1500, "pt": 600, "gl": 200})
for language in ("es", "pt", "gl"):
    for split in ("train", "dev", "test"):
        lines = [f"{english}\t{text}\n" for english, text in source.pairs(language, split)]
        (corpus / f"{language}.{split}.tsv").write_text("".join(lines), encoding="utf-8")
print(*sorted(path.name for path in corpus.iterdir()))
print(next(iter((corpus / "gl.train.tsv").open(encoding="utf-8"))))

# %% [markdown]
# ## A config
#
# `m4 new` looks at the folder, asks what it cannot find out (`--yes` takes its guesses), and writes one complete gin file. It prints
# what it found, the time that training will take, and three commands to paste.


# %%
def m4(command):
    """Runs a command of m4 in the folder, and prints what it says, but for progress on the way."""
    words = [sys.executable, "-m", "m4", *shlex.split(command)]
    said = subprocess.run(words, cwd=here, capture_output=True, text=True)
    print(f"$ m4 {command}\n")
    print("\n".join(line for line in said.stdout.splitlines() if ", left " not in line))
    assert said.returncode == 0, said.stderr


m4("new my_corpus --out=mine.gin --yes")

# %% [markdown]
# What people change first stands at the top of the file:

# %%
text = (here / "mine.gin").read_text(encoding="utf-8")
print("".join(line + "\n" for line in text.splitlines() if line[:1].isupper() and " = " in line))

# %% [markdown]
# Each of these is a flag, too: `--gin.WIDTH=64`. A wrong value is one line that says what is allowed:

# %%
words = [sys.executable, "-m", "m4", "train", "--gin_file=mine.gin", "--gin.LAYERS=0"]
print(subprocess.run(words, cwd=here, capture_output=True, text=True).stderr)

# %% [markdown]
# ## Training, baselines, scores
#
# `m4 demo` makes the vocabulary, trains the shared model, trains a bilingual model for each language with the same trainer until its dev
# score stops rising, translates the test sets with both, and compares. Everything is in one folder. The same command resumes what was
# interrupted.
#
# The sizes here are for a notebook: nothing is trained out, and the numbers show the table, not what is reached.

# %%
SMALL = (
    "--gin.TRAIN_STEPS=150 --gin.BASELINE_STEPS=150 --gin.TEST_SENTENCES=50 --gin.WIDTH=64 "
    "--gin.MLP_WIDTH=128 --gin.HEADS=2 --gin.LAYERS=2 --gin.EXPERTS=4 --gin.VOCABULARY_SIZE=1000 "
    "--gin.experiment.Decoding.beams=1"
)
m4(f"demo --gin_file=mine.gin --model_dir=runs/mine {SMALL}")

# %% [markdown]
# **ΔBLEU** is the shared model's BLEU less the bilingual model's, on the same sentences. In brackets is its 95% interval, by paired
# bootstrap: an interval across zero decides nothing. The copy is the source itself as its translation; a model below it has learned
# nothing yet. [Evaluation](../evaluation.md) defines all of it.
#
# The picture is Figure 6 of GShard: languages by falling size.

# %%
from IPython.display import SVG  # pyright: ignore[reportMissingImports]

SVG(str(here / "runs/mine/delta_bleu.svg"))

# %% [markdown]
# ## Use it

# %%
m4('translate runs/mine --to=gl "3 weeks ago" "in 2 days"')

# %% [markdown]
# Next: [what else a run's folder shows](run.py), [cleaning and sampling](../data.md), [a start from a pretrained
# model](../initial.md), [files of any length](../decoding.md#any-text).
