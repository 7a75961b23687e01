"""The work of decode.py by Hugging Face's NLLB-MoE, or by CTranslate2 without experts; a JSON line.

Needs a separate environment, without m4:

    python -m venv peer && peer/bin/pip install torch transformers==4.57.1 ctranslate2
    peer/bin/python benchmarks/peer_decode.py --experts 8 --beams 4
    peer/bin/python benchmarks/peer_decode.py --mlp_width 1536 --compute_type int8

With experts it is NLLB-MoE, none of whose choices are dropped, with the routing of decode.py.
Without, it is CTranslate2, which has no mixtures of experts, with T5's layers as m4 has them.
(Not transformers 5: its layer trains two of the experts only.)
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
from interleaved import interleaved_steps
from nllb_moe import HEADS, LAYERS, VOCAB, nllb_moe_of

WIDTH = HEADS * 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--mlp_width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--source", type=int, default=64)
    parser.add_argument("--target", type=int, default=64)
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--compute_type", choices=["float32", "int8"], default="float32")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    source_BL = random.integers(5, VOCAB, (args.rows, args.source))
    # Either peer gives its name, and how to translate.
    about, translate = (nllb_moe if args.experts else ctranslate2)(args, source_BL)

    def run() -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        lengths = translate()
        assert set(lengths) == {args.target}, lengths
        return time.perf_counter() - start, time.process_time() - cpu

    run()
    found = about()
    times = [run() for _ in interleaved_steps(args.steps)]
    seconds, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    row = {
        **vars(args),
        **found,
        "seconds": round(seconds, 4),
        "cpu_seconds": round(cpu, 4),
        "tokens_per_second": round(args.rows * args.target / seconds),
    }
    print(json.dumps(row))


Peer = tuple[Callable[[], dict], Callable[[], list[int]]]


def nllb_moe(args: argparse.Namespace, source_BL: np.ndarray) -> Peer:
    import torch  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = nllb_moe_of(
        WIDTH,
        args.mlp_width,
        args.experts,
        moe_eval_capacity_token_fraction=1.0,  # all tokens may choose the same expert
        max_position_embeddings=args.source + args.target,
    ).eval()
    steps: list[int] = []  # the experts of each step of a decoder's layer

    class Scattered(torch.nn.Module):
        """`scattered` of decode.py."""

        def __init__(self, classifier):
            super().__init__()
            self.classifier = classifier
            self.counts = True

        def forward(self, x_SM):
            logits_SE = self.classifier(x_SM)
            logits_SE = 4 * ((logits_SE * 1e4) % 1)
            if self.counts and len(x_SM) == args.rows * args.beams:
                steps.append(len(logits_SE.topk(2).indices.unique()))
            return logits_SE

    for module in model.modules():
        if isinstance(module, transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeTop2Router):
            module.classifier = Scattered(module.classifier)
    source = torch.from_numpy(source_BL)

    def translate() -> list[int]:
        with torch.inference_mode():
            found = model.generate(
                source,
                num_beams=args.beams,
                do_sample=False,
                min_new_tokens=args.target,
                max_new_tokens=args.target,
                length_penalty=0.6,
            )
        return [len(found[0]) - 1] * args.rows

    def about() -> dict:
        for module in model.modules():
            if isinstance(module, Scattered):
                module.counts = False
        return {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "experts_a_step": round(statistics.mean(steps), 2),
        }

    return about, translate


def ctranslate2(args: argparse.Namespace, source_BL: np.ndarray) -> Peer:
    import ctranslate2 as ct2  # type: ignore[import-not-found]

    names = ["<pad>", "</s>", "<unk>", *(f"t{i}" for i in range(3, VOCAB))]
    spec = random_model(args.mlp_width, names)
    with tempfile.TemporaryDirectory() as folder:
        spec.validate()
        spec.optimize()
        spec.save(folder)
        translator = ct2.Translator(
            folder,
            compute_type=args.compute_type,
            intra_threads=len(os.sched_getaffinity(0)),
        )
    source = [[names[token] for token in row] for row in source_BL]

    def translate() -> list[int]:
        found = translator.translate_batch(
            source,
            beam_size=args.beams,
            length_penalty=0.6,
            min_decoding_length=args.target,
            max_decoding_length=args.target,
            max_batch_size=0,
        )
        return [len(one.hypotheses[0]) for one in found]

    def about() -> dict:
        return {"ctranslate2": ct2.__version__}

    return about, translate


def random_model(mlp_width: int, names: list[str]):
    """T5's layers with random matrices."""
    import ctranslate2 as ct2  # type: ignore[import-not-found]

    random = np.random.default_rng(1)
    ones = np.ones(WIDTH, np.float32)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    spec = ct2.specs.TransformerSpec.from_config(
        (LAYERS, LAYERS),
        HEADS,
        pre_norm=True,
        activation=ct2.specs.Activation.RELU,
        relative_attention_bias=True,
        rms_norm=True,
    )
    for stack in (spec.encoder, spec.decoder):
        stack.scale_embeddings = True
        tables = stack.embeddings
        (tables[0] if isinstance(tables, list) else tables).weight = matrix(VOCAB, WIDTH)
        stack.layer_norm.gamma = ones
        for layer in stack.layer:
            own = layer.self_attention
            own.linear[0].weight = matrix(3 * WIDTH, WIDTH)
            own.relative_attention_bias = matrix(32, HEADS)
            own.relative_attention_max_distance = np.int32(128)
            attentions = [own]
            if hasattr(layer, "attention"):
                attentions.append(layer.attention)
                layer.attention.linear[0].weight = matrix(WIDTH, WIDTH)
                layer.attention.linear[1].weight = matrix(2 * WIDTH, WIDTH)
            for attention in attentions:
                attention.layer_norm.gamma = ones
                attention.linear[-1].weight = matrix(WIDTH, WIDTH)
            layer.ffn.layer_norm.gamma = ones
            layer.ffn.linear_0.weight = matrix(mlp_width, WIDTH)
            layer.ffn.linear_1.weight = matrix(WIDTH, mlp_width)
    spec.decoder.projection.weight = spec.decoder.embeddings.weight
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = names[:3]
    spec.config.decoder_start_token = names[0]
    return spec


if __name__ == "__main__":
    main()
