"""COMET and xCOMET for `m4.eval.metrics.external`; runs in an environment with unbabel-comet.

python comet_scorer.py Unbabel/wmt22-comet-da: JSON lines in, a number a line out.
"""

import json
import sys
from itertools import islice

import comet  # type: ignore[import-not-found]

numbers, sys.stdout = sys.stdout, sys.stderr  # what the library prints is no number
model = comet.load_from_checkpoint(comet.download_model(sys.argv[1]))
while rows := [json.loads(line) for line in islice(sys.stdin, 256)]:
    data = [{"src": r["source"], "mt": r["hypothesis"], "ref": r["reference"]} for r in rows]
    for score in model.predict(data, batch_size=16, progress_bar=False).scores:
        print(score, file=numbers, flush=True)
