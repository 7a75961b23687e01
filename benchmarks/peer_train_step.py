r"""Measures a training step of Hugging Face's models, as train_step.py does; prints a JSON line.

Needs a separate environment, without m4:

    python -m venv peer && peer/bin/pip install torch transformers==4.57.1
    peer/bin/python benchmarks/peer_train_step.py --model nllb_moe --balanced
    peer/bin/python benchmarks/peer_train_step.py --model t5 --mlp_width 1536 --compile

(Not transformers 5: its NLLB-MoE trains two of the experts only.) The same work as

    python benchmarks/train_step.py --width 256 --heads 4 --head_width 64 --mlp_width 1024 \
      --layers 4 --experts 8 --vocab 8192 --rows 16 --capacity_factor 1.0 --balanced

`nllb_moe` has both of a token's experts in every other layer, `switch` the first one, `t5` none.
Switch has slots a row, the others a batch. `kept` is the share of choices that have a slot: a peer
computes no others.
"""

import argparse
import json
import os
import statistics
import time

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]
from balanced import ROUTER, preferences
from interleaved import interleaved_steps
from nllb_moe import HEADS, LAYERS, VOCAB, nllb_moe_of

CHOICES = {"nllb_moe": 2, "switch": 1, "t5": 0}  # experts per token


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    result.add_argument("--model", choices=CHOICES, default="nllb_moe")
    result.add_argument("--width", type=int, default=256)
    result.add_argument("--mlp_width", type=int, default=1024)
    result.add_argument("--experts", type=int, default=8)
    result.add_argument("--rows", type=int, default=16)
    result.add_argument("--length", type=int, default=64)
    result.add_argument("--capacity_factor", type=float, default=1.0)
    result.add_argument("--balanced", action="store_true", help="routing, as train_step.py's")
    result.add_argument("--adam", choices=["fused", "foreach"], default="fused")
    result.add_argument("--compile", action="store_true", help="torch.compile")
    result.add_argument("--steps", type=int, default=20)
    return result


def nllb_moe(args: argparse.Namespace):
    return nllb_moe_of(
        args.width,
        args.mlp_width,
        args.experts,
        expert_capacity=round(2 * args.capacity_factor * args.rows * args.length / args.experts),
        max_position_embeddings=max(256, args.length),
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )


def t5_config(args: argparse.Namespace) -> dict:
    return {
        "vocab_size": VOCAB,
        "d_model": args.width,
        "d_kv": args.width // HEADS,
        "d_ff": args.mlp_width,
        "num_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "num_heads": HEADS,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }


def switch(args: argparse.Namespace):
    config = transformers.SwitchTransformersConfig(
        **t5_config(args),
        num_experts=args.experts,
        num_sparse_encoder_layers=LAYERS // 2,
        num_sparse_decoder_layers=LAYERS // 2,
        expert_capacity=round(args.capacity_factor * args.length / args.experts),
        router_jitter_noise=0.0,
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


def t5(args: argparse.Namespace):
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**t5_config(args)))


def routers(model) -> list:
    names = ("NllbMoeTop2Router", "SwitchTransformersTop1Router")
    return [module for module in model.modules() if type(module).__name__ in names]


def balance(model, args: argparse.Namespace) -> None:
    preferred_SE = torch.from_numpy(preferences(args.rows * args.length, args.experts))

    class Balanced(torch.nn.Module):
        def __init__(self, classifier):
            super().__init__()
            self.classifier = classifier

        def forward(self, x):
            logits = ROUTER * self.classifier(x)
            return logits + preferred_SE.reshape(logits.shape)

    for router in routers(model):
        router.classifier = Balanced(router.classifier)


def kept(model, args: argparse.Namespace, batch: dict) -> float | None:
    """Returns the share of choices with a slot, in a separate pass; None without experts."""
    found: list[int] = []

    def count(router, given, result) -> None:
        mask = result[0] if args.model == "switch" else result[1]  # one-hot; weights
        found.append(int(mask.count_nonzero()))

    hooks = [router.register_forward_hook(count) for router in routers(model)]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    choices = len(hooks) * CHOICES[args.model] * args.rows * args.length
    return round(sum(found) / choices, 4) if hooks else None


def main() -> None:
    args = parser().parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = {"nllb_moe": nllb_moe, "switch": switch, "t5": t5}[args.model](args).train()
    if args.balanced:
        balance(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **{args.adam: True})
    shape = (args.rows, args.length)
    batch = {name: torch.randint(5, VOCAB, shape) for name in ("input_ids", "labels")}
    share = kept(model, args, batch)
    run = torch.compile(model) if args.compile else model

    def step() -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        run(**batch).loss.backward()
        optimizer.step()
        return time.perf_counter() - start, time.process_time() - cpu

    for _ in range(4 if args.compile else 2):
        step()
    times = [step() for _ in interleaved_steps(args.steps)]
    seconds, cpu = (sorted(column) for column in zip(*times, strict=True))
    median = statistics.median(seconds)
    row = {
        **vars(args),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": threads,
        "parameters": sum(p.numel() for p in model.parameters()),
        "kept": share,
        "seconds": round(median, 4),
        "fastest": round(seconds[0], 4),
        "cpu_seconds": round(statistics.median(cpu), 4),
        "tokens_per_second": round(2 * args.rows * args.length / median),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
