"""Seconds of torch's ways through one mixture-of-experts layer, forward and backward; JSON lines.

Needs a separate environment, without m4:

    python -m venv peer && peer/bin/pip install torch
    peer/bin/python benchmarks/peer_moe_layer.py --experts 64

The same work as `benchmarks/moe_layer.py`: top-2 of E experts with ReLU, the router, both weights.
`bmm`: slots for all choices when balanced (groups of 512, capacity 2 * 512 / E), experts as one
batched product, as `gather` does it. `grouped_mm`: no slots and no drops, choices sorted by expert,
torch.nn.functional.grouped_mm over their stretches. Their steps are interleaved.
"""

import argparse
import json
import os
import statistics
import time

import torch  # type: ignore[import-not-found]
from interleaved import interleaved_steps


def top2(x_SM, router_ME):
    """Returns (experts [S, 2], normalised weights [S, 2])."""
    gates_SE = torch.softmax((x_SM @ router_ME).float(), dim=-1)
    weight_SK, expert_SK = gates_SE.topk(2, dim=-1)
    return expert_SK, (weight_SK / weight_SK.sum(dim=-1, keepdim=True)).to(x_SM.dtype)


def bmm(x_SM, weights, group_tokens: int):
    """Capacity 2 * group_tokens / E a group; first choices are assigned before second ones."""
    S, M = x_SM.shape
    E = weights["wi"].shape[0]
    G, C = S // group_tokens, 2 * group_tokens // E
    expert_SK, weight_SK = top2(x_SM, weights["router"])
    expert_GKs = expert_SK.reshape(G, group_tokens, 2).transpose(1, 2).reshape(G, -1)
    one_hot = torch.nn.functional.one_hot(expert_GKs, E)
    slot_GKs = (one_hot.cumsum(dim=1) - 1).gather(2, expert_GKs[..., None])[..., 0]
    group = torch.arange(G)[:, None]
    # One past the end: dropped.
    place = torch.where(slot_GKs < C, (expert_GKs * G + group) * C + slot_GKs, E * G * C)
    token = (group * group_tokens + torch.arange(group_tokens).repeat(2)).reshape(-1)
    owner = torch.full((E * G * C + 1,), S, dtype=torch.long)
    owner[place.reshape(-1)] = token
    padded = torch.cat([x_SM, x_SM.new_zeros(1, M)])
    assigned_ECM = padded[owner[:-1]].reshape(E, G * C, M)
    done = torch.bmm(torch.relu(torch.bmm(assigned_ECM, weights["wi"])), weights["wo"])
    done = torch.cat([done.reshape(-1, M), done.new_zeros(1, M)])
    back = done[place.reshape(G, 2, group_tokens).transpose(1, 2).reshape(S, 2)]
    return torch.einsum("skm,sk->sm", back, weight_SK)


def grouped_mm(x_SM, weights, group_tokens: int):
    """Computes all choices, sorted by expert."""
    S, M = x_SM.shape
    E = weights["wi"].shape[0]
    expert_SK, weight_SK = top2(x_SM, weights["router"])
    order = expert_SK.reshape(-1).argsort(stable=True)
    ends = torch.bincount(expert_SK.reshape(-1), minlength=E).cumsum(0).to(torch.int32)
    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    hidden = torch.relu(product(x_SM[order // 2], weights["wi"], offs=ends))
    done = product(hidden, weights["wo"], offs=ends)
    back = torch.empty_like(done).index_copy(0, order, done)
    return torch.einsum("skm,sk->sm", back.reshape(S, 2, M), weight_SK)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in {
        "tokens": 4096,
        "width": 1024,
        "mlp_width": 4096,
        "experts": 8,
        "group_tokens": 512,
        "steps": 6,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    E, M, F = args.experts, args.width, args.mlp_width
    shapes = {"router": (M, E), "wi": (E, M, F), "wo": (E, F, M)}
    weights = {
        name: (torch.randn(shape) * shape[-2] ** -0.5).requires_grad_()
        for name, shape in shapes.items()
    }
    x_SM = torch.randn(args.tokens, M, requires_grad=True)

    def run(way) -> float:
        start = time.perf_counter()
        y_SM = way(x_SM, weights, args.group_tokens)
        (0.5 * (y_SM * y_SM).sum()).backward()
        seconds = time.perf_counter() - start
        for tensor in (x_SM, *weights.values()):
            tensor.grad = None
        return seconds

    ways = (bmm, grouped_mm)
    for way in ways:
        run(way)
    seconds = {way.__name__: [] for way in ways}
    for _ in interleaved_steps(args.steps):
        for way in ways:
            seconds[way.__name__].append(run(way))
    for name, each in seconds.items():
        row = {"way": name, **vars(args), "seconds": round(statistics.median(each), 4)}
        row |= {"fastest": round(min(each), 4), "torch": torch.__version__}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
