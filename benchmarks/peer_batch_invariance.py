"""Counts tokens of other libraries' translations that change with the batch; prints JSON lines.

Needs a separate environment, without m4, and a model that m4 exported (`m4 export --format=hf`):

    python -m venv peer && peer/bin/pip install torch transformers==4.57.1 sentencepiece ctranslate2
    peer/bin/python benchmarks/peer_batch_invariance.py --model=served --sentences=tagged.txt
    peer/bin/ct2-transformers-converter --model served --output_dir served_ct2
    peer/bin/python benchmarks/peer_batch_invariance.py --model=served --ctranslate2=served_ct2 \
        --sentences=tagged.txt
    peer/bin/python benchmarks/peer_batch_invariance.py --model=served --nllb_moe=8 \
        --sentences=tagged.txt

The sentences have their tags ("<2gl> 3 weeks ago"). Ways to batch them are those of
batch_invariance.py, and so is the count: tokens that are others than one sentence at a time, or
missing, or new behind. `--nllb_moe=E` is Hugging Face's NLLB-MoE with E experts and random weights,
with the library's capacity outside training (the trained ones have 54 billion parameters); the
model gives the tokenizer alone.
"""

import argparse
import json
import os
import random
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from nllb_moe import HEADS, VOCAB, nllb_moe_of

# Rows per batch, and whether the sentences are shuffled; others are compared with the first
# (as in batch_invariance.py).
WAYS = ((1, False), (8, False), (64, False), (64, True), (256, False), (256, True))
Translate = Callable[[Sequence[str]], list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sentences", type=Path, required=True)
    parser.add_argument("--ctranslate2", type=Path)
    parser.add_argument("--nllb_moe", type=int, default=0, metavar="EXPERTS")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="pieces of a source, and target")
    args = parser.parse_args()
    lines = args.sentences.read_text(encoding="utf-8").splitlines()
    name, translate = (ctranslate2 if args.ctranslate2 else huggingface)(args)
    first: list[list[int]] = []
    for rows, shuffled in WAYS:
        order = list(range(len(lines)))
        if shuffled:
            random.Random(0).shuffle(order)
        found: list[list[int]] = [[] for _ in lines]
        for start in range(0, len(order), rows):
            batch = order[start : start + rows]
            results = translate([lines[i] for i in batch])
            for i, tokens in zip(batch, results, strict=True):
                found[i] = tokens
        first = first or found
        row = {
            "peer": name,
            "rows": rows,
            "shuffled": shuffled,
            "sentences": len(lines),
            "tokens": sum(map(len, first)),
            "changed": sum(changed(a, b) for a, b in zip(first, found, strict=True)),
        }
        print(json.dumps(row), flush=True)


def changed(before: Sequence[int], after: Sequence[int]) -> int:
    """Returns the number of tokens that differ, are missing or are added."""
    differ = sum(a != b for a, b in zip(before, after, strict=False))
    return differ + abs(len(before) - len(after))


def huggingface(args: argparse.Namespace) -> tuple[str, Translate]:
    import torch  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    if args.nllb_moe:
        torch.manual_seed(0)
        # With tied random embeddings, the last token would repeat, and the end come at once.
        model = nllb_moe_of(HEADS * 64, 1024, args.nllb_moe, tie_word_embeddings=False)
    else:
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(args.model)
    model = model.eval()

    def translate(lines: Sequence[str]) -> list[list[int]]:
        batch = tokenizer(
            list(lines), return_tensors="pt", padding=True, truncation=True, max_length=args.length
        )
        if args.nllb_moe:  # the pieces of another vocabulary: any will do for random weights
            batch["input_ids"] %= VOCAB
        with torch.inference_mode():
            made = model.generate(
                **batch,
                num_beams=args.beams,
                max_new_tokens=args.length,
                min_new_tokens=args.length if args.nllb_moe else None,
            )
        pad, end = model.config.pad_token_id, model.config.eos_token_id
        return [until(row.tolist()[1:], end, pad) for row in made]

    return f"{type(model).__name__}, transformers {version('transformers')}", translate


def until(tokens: Sequence[int], end: int, pad: int) -> list[int]:
    """Returns the tokens of one translation, with its end and without padding behind it."""
    if end in tokens:
        return list(tokens[: tokens.index(end) + 1])
    return [token for token in tokens if token != pad]


def ctranslate2(args: argparse.Namespace) -> tuple[str, Translate]:
    import ctranslate2 as library  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = library.Translator(str(args.ctranslate2), compute_type="float32")

    def translate(lines: Sequence[str]) -> list[list[int]]:
        pieces = [
            tokenizer.convert_ids_to_tokens(
                tokenizer(line, truncation=True, max_length=args.length)["input_ids"]
            )
            for line in lines
        ]
        made = model.translate_batch(
            pieces, beam_size=args.beams, max_decoding_length=args.length, max_batch_size=0
        )
        return [tokenizer.convert_tokens_to_ids(each.hypotheses[0]) for each in made]

    return f"CTranslate2 {version('ctranslate2')}, float32", translate


if __name__ == "__main__":
    main()
