"""Recorded numbers of short runs: a change that should change no number can show that it did not.

    python -m tests.golden_run              # compares, as two tests do (two minutes)
    python -m tests.golden_run --full       # the real configs: 40 and 20 steps (some minutes)
    python -m tests.golden_run --record     # writes golden.json for this machine (also with --full)

The runs go through the command line, each with `m4 train` and, where text is compared, `m4 eval`:

- `demo`: gin_configs/demo.gin with a small model and corpus, 6 steps, translations and scores.
- `tatoeba`: gin_configs/tatoeba_102/moe_8.gin in the same way, on text of CLDR, 4 steps.
- `two_processes`: the demo as two processes of two devices, 3 steps, one layer.
- `einsum`, `gather`, ...: one layer of it over eight CPU devices, 2 steps with each dispatch.
- `demo_40` and `tatoeba_20` (`--full`): these two configs with their own sizes, on all text that
  they ask for (`tatoeba_20`: CLDR's 16 largest languages), translating four sentences a direction.

golden.json has SHA-256 of the batches, of every item of the last checkpoint (parameters, their
average, the optimizer's state), of the rows of metrics.jsonl without times, of translations with
their scores, and of the rows of scores.jsonl; and losses in plain numbers, which say how far two
runs are apart. Batches are the same on every machine and are always compared. Floating-point
numbers depend on JAX's version, on the CPU's instruction set and on how XLA compiles for it: they
are recorded under a key made of the three (`reading.key`). On a machine whose key is not in the
file they are not compared, and the test says so. Translations of models this young also depend on
the number of cores, since two search a batch in two parts: they are recorded on two.

What a refactoring may change: fingerprints, run.json and the content of notes, the layout of the
run folder (then `reading.py` changes with it, and nothing else here), the names
and the order of settings, paths of modules (then `configs/` changes), what is printed, times, and
the rows of metrics.jsonl that hold times (`reading.TIMES`).

What it may not change: the pairs, token ids and order of a batch; names, shapes, types and bits of
parameters and of the optimizer's state; names and bits of every other metric; translations, their
scores, and the score, interval and number of sentences of each system, direction, metric and
subset. A change that alters a number on purpose records again, in a separate commit that says why.
"""
