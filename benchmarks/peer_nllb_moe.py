"""Seconds of a training step of Hugging Face's NLLB-MoE, a peer of train_step.py; a JSON line.

Needs a separate environment, without m4:

    python -m venv peer && peer/bin/pip install torch transformers==4.57.1
    peer/bin/python benchmarks/peer_nllb_moe.py

(Not transformers 5: its layer trains two of the experts only.) The same work as

    python benchmarks/train_step.py --width 256 --heads 4 --head_width 64 --mlp_width 1024 \\
      --layers 4 --experts 8 --vocab 8192 --rows 16 --capacity_factor 1.0

a shape of 4 + 4 layers with a mixture in every other one, both of a token's experts, Adam.
"""

import argparse
import json
import os
import statistics
import time

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]
from interleaved import interleaved_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = transformers.NllbMoeConfig(
        vocab_size=8192,
        d_model=256,
        encoder_layers=4,
        decoder_layers=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        num_experts=args.experts,
        expert_capacity=2 * args.rows * args.length // args.experts,
        second_expert_policy="all",
        max_position_embeddings=256,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
    model = transformers.NllbMoeForConditionalGeneration(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=True)
    source = torch.randint(5, 8192, (args.rows, args.length))
    target = torch.randint(5, 8192, (args.rows, args.length))

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=source, labels=target).loss.backward()
        optimizer.step()
        return time.perf_counter() - start

    for _ in range(2):
        step()
    seconds = [step() for _ in interleaved_steps(args.steps)]
    median = statistics.median(seconds)
    row = {
        **vars(args),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": threads,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(median, 4),
        "fastest": round(min(seconds), 4),
        "tokens_per_second": round(2 * args.rows * args.length / median),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
