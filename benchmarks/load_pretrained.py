"""Loads a random model of MADLAD-400 3B's shape, and prints the time and memory.

    python benchmarks/load_pretrained.py --folder=/tmp/madlad [--layers=32]

The model is written first, with a shard per layer, unless it exists: 11.8 GB with 32 layers.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from m4.data.vocabulary.vocabulary import Model
from m4.jobs.checkpoints.initial import SourceHf
from m4.model.transformer import Transformer
from m4.parallel.mesh import make_mesh
from m4.storage import safetensors
from m4.storage.checkpoints import by_path
from m4.train import hf_layout, initial
from m4.train.initial import Rows
from m4.train.optimizer import adafactor
from m4.train.program import train_program
from m4.train.training import Training

MADLAD_3B = {
    "model_type": "t5", "vocab_size": 256_000, "d_model": 1024, "d_ff": 8192, "d_kv": 128,
    "num_heads": 16, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip


def write(folder: Path, layers: int) -> None:
    """Writes config.json, a vocabulary of made-up pieces, and shards of random numbers."""
    folder.mkdir(parents=True)
    config = {**MADLAD_3B, "num_layers": layers, "num_decoder_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    spelled = Model()
    for i, piece in enumerate(["<unk>", "<s>", "</s>", *map("x{}".format, range(3, 256_000))]):
        kind = "NORMAL" if i > 2 else "CONTROL" if i else "UNKNOWN"
        kind = getattr(Model.SentencePiece, kind)
        spelled.pieces.add(piece=piece, type=kind, score=-float(i))
    (folder / "spiece.model").write_bytes(spelled.SerializeToString())
    model = Transformer(**hf_layout.settings_of(config))
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for path, shape in initial.shapes_of(model).items():
        place = hf_layout.place(path, shape, model)
        assert place is not None
        shards.setdefault(path.partition("/")[0], {})[place.names[0]] = place.shape(shape)
    draw, index = np.random.default_rng(0), {}
    for number, (_, arrays) in enumerate(sorted(shards.items()), 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        made = {
            name: draw.standard_normal(shape, np.float32) * np.float32(0.02)
            for name, shape in arrays.items()
        }
        safetensors.write(folder / file, made, {})
        index |= dict.fromkeys(arrays, file)
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": index}))


def main() -> None:
    """Writes the folder unless it exists, and loads it like training does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    if not arguments.folder.exists():
        write(arguments.folder, arguments.layers)
        print("written; run again, so that the memory is that of loading alone")
        return
    start = time.perf_counter()
    there = SourceHf(arguments.folder)
    model = there.model.clone(scan_layers=True)
    training = Training(optimizer=adafactor, total_steps=1, batch_size=8)
    program = train_program(training, model, ["en-gl"], make_mesh())
    rows = Rows(np.arange(there.vocabulary().size, dtype=np.int32), {})
    state = there.begin(program, initial.plan(there.shapes, model, None, lambda _: rows))
    size = sum(array.nbytes for array in by_path(state.params).values())
    (peak,) = (
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    seconds = time.perf_counter() - start
    print(
        f"{size / 1e9:.2f} GB of parameters in {seconds / 60:.1f} minutes; peak of the process "
        f"{peak / 1e9:.2f} GB, {peak / size:.2f} times their size"
    )


if __name__ == "__main__":
    main()
