"""Compares Hugging Face's routers with the golden cases of m4's gates; prints JSON lines.

Needs a separate environment, without m4:

    python -m venv peer && peer/bin/pip install torch transformers==4.57.1
    peer/bin/python benchmarks/peer_routers.py

A case is a group of logits with a capacity, padding and random numbers, and the plan of GShard's
Algorithm 1 for it (tests/testdata/gates). A router passes where it chooses the same experts for the
same tokens, with the same weights within 2e-6. m4's gates pass all of them: tests/model/gates.
"""

import importlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np
import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

GOLDEN = Path(__file__).parents[1] / "tests" / "testdata" / "gates"
CASES = ("tiny", "small", "e2", "overflow", "pad", "ties")
# Golden variant -> second_expert_policy, normalize_router_prob_before_dropping; None: top-1.
VARIANTS = {
    "all": ("all", True),
    "all_after": ("all", False),
    "paper_freeseat": ("random", True),
    "random_after": ("random", False),
    "switch": None,
}


def main() -> None:
    inputs, golden = (np.load(GOLDEN / f"{name}.npz") for name in ("inputs", "alg1"))
    for variant, settings in VARIANTS.items():
        passed = []
        for case in CASES:
            expected_GSE = golden[f"{case}/alg1/{variant}/combine"].sum(-1)
            found_GSE = np.stack([*weights(inputs, case, settings)])
            same = ((found_GSE > 0) == (expected_GSE > 0)).all()
            if same and np.allclose(found_GSE, expected_GSE, rtol=0, atol=2e-6):
                passed.append(case)
        name = "NllbMoeTop2Router" if settings else "SwitchTransformersTop1Router"
        row = {"router": name, "variant": variant, "passed": passed, "of": len(CASES)}
        print(json.dumps({**row, "transformers": version("transformers")}), flush=True)


def weights(inputs, case: str, settings: tuple[str, bool] | None) -> Iterator[np.ndarray]:
    """Yields the weights [S, E] of each group."""
    logits_GSE, paddings_GS, uniform_GS = (
        torch.tensor(inputs[f"{case}/{name}"]) for name in ("logits", "paddings", "uniform")
    )
    experts, capacity = logits_GSE.shape[-1], int(inputs[f"{case}/capacity"])
    for logits_SE, paddings_S, uniform_S in zip(logits_GSE, paddings_GS, uniform_GS, strict=True):
        if settings is None:
            config = transformers.SwitchTransformersConfig(
                d_model=experts, num_experts=experts, expert_capacity=capacity
            )
            code = importlib.import_module(
                "transformers.models.switch_transformers.modeling_switch_transformers"
            )

            router = code.SwitchTransformersTop1Router(config).eval()
            router.classifier.weight.data = torch.eye(experts)
            chosen, largest, _ = router(logits_SE[None])
            yield (chosen * largest)[0].detach().numpy()
            continue
        code = importlib.import_module("transformers.models.nllb_moe.modeling_nllb_moe")

        config = transformers.NllbMoeConfig(
            d_model=experts,
            num_experts=experts,
            expert_capacity=capacity,
            second_expert_policy=settings[0],
            normalize_router_prob_before_dropping=settings[1],
            moe_eval_capacity_token_fraction=0.0,  # `expert_capacity` counts
        )
        router = code.NllbMoeTop2Router(config).eval()
        with mock.patch.object(torch, "rand_like", lambda _, coin=uniform_S: coin):
            _, weights_SE = router.route_tokens(logits_SE, padding_mask=paddings_S)
        yield weights_SE.numpy()


if __name__ == "__main__":
    main()
