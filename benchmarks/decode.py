"""Measures the seconds of a translated batch by greedy or beam search; prints a JSON line.

    python benchmarks/decode.py --experts 8 --beams 4
    python benchmarks/decode.py --mlp_width 1536

All translations have the requested number of tokens, as no search ends early. Routing is balanced,
by the later digits of an untrained router's logits (`scattered`). Like in `m4 decode`, rows are
divided over up to two cores (--at_once), unless a core had fewer than 16 hypotheses.
`experts_a_step` is the mean number of experts of a layer that the tokens of one step use; tokens
that choose at random would use `experts_a_step_at_random`. `limit_seconds` is the time of the
matrix products alone at the machine's fastest. peer_decode.py does the same work with Hugging
Face's NLLB-MoE and with CTranslate2.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from interleaved import interleaved_steps
from process import device

from m4.data.preprocess import EOS_ID
from m4.eval.decoding.decode import parts_of_a_batch, searched
from m4.eval.decoding.search import search
from m4.model.flops import forward_model_flops, search_flops
from m4.model.gates.top2_gshard import top2_gshard
from m4.model.moe import MoeLayer, assigned_choices
from m4.model.routing import Capacity, Routing, Tokens
from m4.model.transformer import Transformer
from m4.parallel.platform.hardware import restart_with_huge_pages
from m4.train.measuring.step_clock import peak_flops


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in {
        "width": 256,
        "heads": 4,
        "head_width": 64,
        "mlp_width": 1024,
        "layers": 4,
        "experts": 0,  # in every other layer; 0 means a dense model
        "vocab": 8192,
        "rows": 16,
        "at_once": 0,  # default: as in `m4 decode`
        "source": 64,
        "target": 64,
        "beams": 1,
        "steps": 10,
    }.items():
        result.add_argument(f"--{name}", type=int, default=default)
    result.add_argument("--whole_cache", action="store_true", help="from the first step on")
    return result


class NeverEnding(Transformer):
    """A model whose translations do not end."""

    def decode(self, *args, **kwargs) -> jax.Array:
        logits_BTV = super().decode(*args, **kwargs)
        # Excludes EOS and padding.
        return jnp.where(jnp.arange(self.vocab_size) <= EOS_ID, -1e9, logits_BTV)


def scattered(tokens: Tokens, num_experts: int, capacity: Capacity) -> Routing:
    """Routes like top2_gshard by later digits of the logits: nearly random, but fixed per token."""

    def score(name: str, **options) -> jax.Array:
        return 4 * (tokens.score(name, **options) * 1e4 % 1)

    return top2_gshard(dataclasses.replace(tokens, score=score), num_experts, capacity)


def experts_a_step(model: Transformer, params, source_BL, best_BT: np.ndarray) -> float:
    """Returns the mean number of experts used in a step of a decoder layer.

    It is counted on the best translations, with their positions as directions.
    """
    input_BT = np.pad(best_BT, [(0, 0), (1, 0)])[:, :-1]
    length = best_BT.shape[1]
    _, sown = model.clone(directions=length).apply(
        {"params": params}, source_BL, input_BT, best_BT, enable_dropout=False,
        decoder_direction_ids=np.broadcast_to(np.arange(length), best_BT.shape),
        mutable=["intermediates"],
    )  # fmt: skip
    layers = assigned_choices(sown["intermediates"]).values()
    return float(np.mean([np.count_nonzero(count_DE, axis=1) for count_DE in layers]))


def model_of(args: argparse.Namespace) -> NeverEnding:
    experts = functools.partial(MoeLayer, num_experts=args.experts, gate=scattered)
    return NeverEnding(
        vocab_size=args.vocab,
        width=args.width,
        heads=args.heads,
        head_width=args.head_width,
        mlp_width=args.mlp_width,
        encoder_layers=args.layers,
        decoder_layers=args.layers,
        moe=experts if args.experts else None,
    )


def main() -> None:
    args = parser().parse_args()
    args.at_once = args.at_once or parts_of_a_batch(args.rows, args.beams)
    model = model_of(args)
    random = np.random.default_rng(0)
    source_BL = random.integers(3, args.vocab, (args.rows, args.source), dtype=np.int32)
    short = jnp.ones((1, 8), jnp.int32)
    init = functools.partial(model.init, enable_dropout=False)
    params = jax.jit(init)(jax.random.key(0), short, short, short)["params"]

    def translated(rows_BL: np.ndarray) -> np.ndarray:
        batch, grows = {"encoder_input_tokens": rows_BL}, not args.whole_cache
        found = search(model, params, batch, args.target, args.beams, 0.6, grows=grows)
        return np.asarray(jax.block_until_ready(found)[0])[:, 0]

    parts = np.split(source_BL, args.at_once)

    def run() -> tuple[float, float, np.ndarray]:
        start, cpu = time.perf_counter(), time.process_time()
        found = [best_BT for _, best_BT in searched(translated, parts, args.at_once)]
        best_BT = np.concatenate(found)
        return time.perf_counter() - start, time.process_time() - cpu, best_BT

    first, _, best_BT = run()
    assert best_BT.all(), "a translation has ended"
    peaks: list[float] = []

    def measure_peak() -> None:
        peaks.extend(peak_flops(jax.devices(), model.dtype) for _ in range(3))

    times = [run()[:2] for _ in interleaved_steps(args.steps, measure_peak)]
    seconds, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    lengths = (args.rows, args.source, args.target)
    encoding, step = map(forward_model_flops, search_flops(model, *lengths, args.beams))
    row = {
        **vars(args),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "seconds": round(seconds, 4),
        "cpu_seconds": round(cpu, 4),
        "limit_seconds": round((encoding + args.target * step) / max(peaks), 4),
        "tokens_per_second": round(args.rows * args.target / seconds),
        "compile_seconds": round(first - seconds, 1),
        **device(),
    }
    if args.experts:
        random_choices = args.experts * (1 - (1 - 2 / args.experts) ** args.rows)
        row["experts_a_step"] = round(experts_a_step(model, params, source_BL, best_BT), 2)
        row["experts_a_step_at_random"] = round(random_choices, 2)
    print(json.dumps(row))


if __name__ == "__main__":
    restart_with_huge_pages()  # as `m4` does
    main()
