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
their log-probabilities, and of the rows of scores.jsonl; and losses in plain numbers, which say how
far two runs are apart. Only the four cases of a whole config translate: dispatches and processes
differ in training. Batches are the same on every machine and are always compared. Floating-point
numbers depend on JAX's version, on the CPU's instruction set, on how XLA compiles for it and, in a
search, on the number of cores, of which the runs take two where there are more: they are recorded
under a key made of the four (`reading.key`). On a machine whose key is not in the file they are not
compared, and the test says so.

What a refactoring may change: fingerprints, run.json and the content of notes, the layout of the
run folder (then `reading.py` changes with it, and nothing else here), the names
and the order of settings, paths of modules (then `configs/` changes), what is printed, times, and
the rows of metrics.jsonl that hold times (`reading.TIMES`).

What it may not change: the pairs, token ids and order of a batch; names, shapes, types and bits of
parameters and of the optimizer's state; names and bits of every other metric; translations, their
log-probabilities, and the score, interval and number of sentences of each system, direction, metric
and subset. A change that alters a number on purpose records again, in a separate commit that says
why. So it was twice: text in NFC changed all numbers, and a search that adds up in another order
changed log-probabilities by 2e-7, and no text and no score.
"""
