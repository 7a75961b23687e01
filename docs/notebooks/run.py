# ---
# jupyter:
#   # A notebook as text: VS Code opens it, and Jupyter with jupytext; `make docs` shows it with its results.
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Reading a run
#
# A run is a folder of plain files ([all of them](../run_folder.md)). Three questions to it: does it still learn, which language goes to
# which expert, and where do translations fail? Curves and scores here are those kept of [E1](../../results/e1_tatoeba_102/README.md), three
# models of 102 languages into English; for experts and sentences a small model is trained on the way. Your own run has the same files.

# %%
import json
import statistics
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


E1 = Path("results/e1_tatoeba_102")
SYSTEMS = ("dense", "moe_8", "moe_64")

# %% [markdown]
# ## Curves
#
# `metrics.jsonl` has a row for each log step and evaluation. `nll` is the training loss in nats a token, `dev/nll` the mean over
# dev tokens. Two models on the same batches are compared by the difference, where a hundredth can be seen.

# %%
dev = {}
for name in SYSTEMS:
    rows = [row for row in rows_of(E1 / "systems" / name / "metrics.jsonl") if "dev/nll" in row]
    dev[name] = {row["step"]: row["dev/nll"] for row in rows}
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
for name, losses in dev.items():
    left.plot(*zip(*[(step, loss) for step, loss in losses.items() if step >= 500]), label=name)
    both = [step for step in losses if step in dev["dense"] and step >= 500]
    right.plot(both, [losses[step] - dev["dense"][step] for step in both], label=name)
left.set(title="dev/nll", xlabel="step")
right.set(title="dev/nll less dense", xlabel="step")
left.legend(frameon=False)
plt.show()

# %% [markdown]
# The left picture says that the runs still learned when they were stopped; the right one that the lead of 64 experts still grew. What else is
# in a row:
#
# | name | a bad sign |
# | --- | --- |
# | `gradient_norm` | it grows while the loss does not fall |
# | `fraction_tokens_left_behind`, `first_overflow` | more than a few percent late in training: the capacity is too small or the load uneven |
# | `dead_experts` | above 0: experts that nobody uses |
# | `router_confidence` | 1 with two choices: the second expert has no say ([why a z-loss](../decisions.md#training)) |
# | `nll/low` against `dev/nll/<direction>` of small languages | training falls, dev rises: repeated too often; lower the temperature |

# %%
names = ("auxiliary_loss", "fraction_tokens_left_behind", "dead_experts", "router_confidence")
for name in ("moe_8", "moe_64"):
    last = [row for row in rows_of(E1 / "systems" / name / "metrics.jsonl") if "nll" in row][-1]
    print(name, last["step"], {key: round(last[key], 3) for key in names})

# %% [markdown]
# ## Experts by language
#
# Training counts the choices of every layer by direction and expert, in `atlas.train.json`; `m4 atlas` draws them. Here the demo's model is
# trained in small, with six languages.

# %%
import m4

folder = Path(tempfile.mkdtemp()) / "run"
run = m4.train(
    "gin_configs/demo.gin", model_dir=folder,
    bindings=[
        "cldr.Cldr.sizes = {'de': 800, 'es': 800, 'gl': 300, 'ru': 800, 'bg': 800, 'mk': 300}",
        "corpus.CorpusSpec.vocabulary_size = 1500",
        "transformer.Transformer.width = 64",
        "transformer.Transformer.heads = 2",
        "transformer.Transformer.mlp_width = 128",
        "TRAIN_STEPS = 150",
        "experiment.Decoding.beams = 1",
        "experiment.Decoding.test_sentences = 20",
    ],
)  # fmt: skip
atlas = json.loads((folder / "atlas.train.json").read_text(encoding="utf-8"))
figure, axes = plt.subplots(1, len(atlas["layers"]), figsize=(8, 3.2), layout="constrained")
for layer, (name, counts_DE) in zip(axes, sorted(atlas["layers"].items())):
    share_DE = np.array(counts_DE) / np.sum(counts_DE, axis=1, keepdims=True)
    layer.imshow(share_DE, cmap="Blues", vmin=0, vmax=0.5)
    layer.set(
        title=name, xlabel="expert", yticks=range(len(share_DE)), xticks=range(share_DE.shape[1])
    )
    layer.set_yticklabels(atlas["directions"])
plt.show()

# %% [markdown]
# Even is 1/8 of a row, and rows that look alike share experts. After 150 steps already the three languages in Cyrillic share experts of the
# decoder, and so do the directions into English, whose decoder writes one language.
#
# One sentence, token by token, with the experts of each piece and their weights:

# %%
seen = run.explain("3 weeks ago", to="gl")
print(seen.text)
for piece, experts in zip(seen.source, seen.experts["encoder_1"]):
    print(f"{piece:8}", {expert: round(weight, 2) for expert, weight in experts.items()})

# %% [markdown]
# ## Where translations fail
#
# First by language. `deltas.jsonl` has ΔBLEU with its interval, `rates.jsonl` how often a check finds something wrong, and the same checks of
# the references: their false alarms.

# %%
deltas = [
    row
    for row in rows_of(E1 / "deltas.jsonl")
    if (row["system"], row["baseline"], row["metric"]) == ("moe_64", "bilingual", "bleu")
]
rates = {
    (row["system"], row["direction"]): row
    for row in rows_of(E1 / "rates.jsonl")
    if row["split"] == "test"
}
print(f"{'':24}  pairs  ΔBLEU                  loops  copies  length")
for row in sorted(deltas, key=lambda row: row["delta"])[:6]:
    rate = rates["moe_64", row["direction"]]
    interval = f"{row['delta']:+6.1f} [{row['low']:+.1f}, {row['high']:+.1f}]"
    print(
        f"{row['name'][:24]:24} {row['train_pairs']:6,} {interval:22} {rate['loops']:5.1%} {rate['copies']:7.1%} {rate['length_ratio']:7.2f}"
    )
for system in ("bilingual", "moe_64", "reference"):
    found = [rate for (name, _), rate in rates.items() if name == system]
    print(
        system,
        {
            key: f"{statistics.mean(r[key] for r in found):.1%}"
            for key in ("off_script", "copies", "loops")
        },
    )

# %%
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
lengths = [rates["moe_64", row["direction"]]["length_ratio"] for row in deltas]
points = axes.scatter(
    [row["train_pairs"] for row in deltas],
    [row["delta"] for row in deltas],
    c=lengths,
    cmap="viridis",
    s=18,
)
axes.axhline(0, color="#777777", linewidth=0.8)
axes.set(xscale="log", xlabel="training pairs", ylabel="ΔBLEU, 64 experts")
figure.colorbar(points, label="length ratio")
plt.show()

# %% [markdown]
# Then by sentence. A metric is additive counts a sentence and a formula, so any set of sentences has a score, one of them too:

# %%
from m4.eval.metrics.chrf import chrf

run.decode()
rows = rows_of(folder / "decodes" / "test.en-gl.jsonl")
counted = chrf([row["hypothesis"] for row in rows], [row["reference"] for row in rows], "gl")
scores = counted.formula(counted.counts)
for i in np.argsort(scores)[:4]:
    print(
        f"chrF {scores[i]:4.1f}  {rows[i]['source']}\n           wanted: {rows[i]['reference']}\n           got:    {rows[i]['hypothesis']}"
    )

# %% [markdown]
# `m4 report` puts all of this on one page, for several runs side by side ([evaluation](../evaluation.md#several-runs-in-one-report)).
