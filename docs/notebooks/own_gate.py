# ---
# jupyter:
#   # A notebook as text: VS Code opens it, and Jupyter with jupytext; `make docs` shows it with its results.
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A gate of your own in an afternoon
#
# A gate is one function: from tokens, the number of experts and their capacity to a plan. This notebook writes one, tests the
# laws that all gates keep, puts it into a layer, and trains it next to m4's. [A gate by hand](gate.py) explains slots and capacity.
#
# The idea to try: the best expert alone, weighted by its own sigmoid, so that experts do not compete for the weight.
#
# ## The function
#
# It goes into a file of its own, next to the config that will name it.

# %%
import sys
import tempfile
from pathlib import Path
from typing import Any

here = Path(tempfile.mkdtemp())
(here / "my_gate.py").write_text('''
import jax

from m4.model.routing import Capacity, Routing, Tokens, balance_loss, plan_choices, top_k
from m4.settings import Size, checked


@checked
def sigmoid_gate(
    tokens: Tokens, num_experts: int, capacity: Capacity, *, choices: Size = 1
) -> Routing:
    """Routes each token to its best experts, each weighted by its own sigmoid."""
    logits_GSE = tokens.score("router")  # tokens times a matrix [M, E], float32
    best_GSK, expert_GSK = top_k(logits_GSE, choices)
    return plan_choices(  # hands out slots: all first choices, then all second ones
        expert_GSK,
        jax.nn.sigmoid(best_GSK),
        tokens.mask_GS,
        num_experts,
        capacity(choices),
        logits_GSE=logits_GSE,
        aux_loss=balance_loss(jax.nn.softmax(logits_GSE), expert_GSK, tokens.mask_GS),
    )
''')
sys.path.insert(0, str(here))
from my_gate import sigmoid_gate  # pyright: ignore[reportMissingImports]

# %% [markdown]
# `@checked` makes `choices` a setting: `my_gate.sigmoid_gate.choices = 2` in a config, and a wrong value is one line.
#
# ## Look at a plan
#
# `Tokens` is all that a gate may look at: scores on demand, the mask of real tokens, ids, random numbers.

# %%
import jax
import jax.numpy as jnp
import numpy as np

from m4.model.routing import Tokens, expert_capacity

G, S, E = 2, 8, 4
logits_GSE = jax.random.normal(jax.random.key(0), (G, S, E))
mask_GS = jnp.ones((G, S), bool).at[1, 6:].set(False)  # the second group ends with padding
tokens = Tokens(score=lambda name, **_: logits_GSE, mask_GS=mask_GS)
plan = sigmoid_gate(tokens, E, lambda choices: expert_capacity(S, E, 1.0, choices, "paper"))
print("experts", plan.expert_GSK[..., 0], "slots", plan.position_GSK[..., 0], sep="\n")
print("weights", np.round(np.array(plan.weight_GSK[..., 0], float), 2), sep="\n")
print({name: np.round(np.array(value, float), 2).tolist() for name, value in plan.metrics.items()})

# %% [markdown]
# ## Laws
#
# What holds for every gate is quickly said, and finds most mistakes: no slot is used twice, padding takes none, a choice without a
# slot has no weight, and an even load has an auxiliary loss of 1. `tests/model/test_gates.py` checks these and more for every file in
# `m4/model/gates`.

# %%
taken = [
    (g, int(e), int(c))
    for g in range(G)
    for e, c in zip(plan.expert_GSK[g, :, 0], plan.position_GSK[g, :, 0])
    if c >= 0
]
assert len(taken) == len(set(taken))
assert plan.position_GSK.max() < plan.capacity
assert (plan.position_GSK[~mask_GS] == -1).all()
assert (plan.weight_GSK[plan.position_GSK < 0] == 0).all()
even = Tokens(score=lambda name, **_: 20 * jnp.eye(E)[jnp.arange(S) % E][None], mask_GS=mask_GS[:1])
np.testing.assert_allclose(sigmoid_gate(even, E, lambda choices: S).aux_loss, 1.0, rtol=1e-5)

# %% [markdown]
# ## In a layer
#
# The layer makes the router's matrix, asks the gate for a plan, and moves the tokens. It is a flax module that any flax model can use.

# %%
import m4

layer = m4.MoeLayer(
    num_experts=E, mlp_width=32, activations=("relu",), dropout_rate=0.0, gate=sigmoid_gate
)
x_BLM, mask_BL = jnp.ones((2, 5, 16)), jnp.ones((2, 5), bool)
variables = layer.init(jax.random.key(0), x_BLM, mask_BL, deterministic=True)
print(jax.tree.map(jnp.shape, variables["params"]))


def total(params):
    y_BLM: Any = layer.apply({"params": params}, x_BLM, mask_BL, deterministic=True)
    return y_BLM.sum()


gradient = jax.grad(total)
print("router's gradient:", float(jnp.abs(gradient(variables["params"])["router"]["kernel"]).sum()))

# %% [markdown]
# ## In a run
#
# A config that includes another one and names the gate. Both runs see the same batches: a batch is a function of the seed and the step.

# %%
import matplotlib.pyplot as plt

SMALL = """
cldr.Cldr.sizes = {'es': 800, 'gl': 200}
corpus.CorpusSpec.vocabulary_size = 600
transformer.Transformer.width = 32
transformer.Transformer.heads = 2
transformer.Transformer.head_width = 16
transformer.Transformer.mlp_width = 64
moe.MoeLayer.num_experts = 4
experiment.Training.log_period = 10
experiment.Training.tensorboard = False
TRAIN_STEPS = 80
"""
start = f"from __gin__ import dynamic_registration\n\ninclude '{Path('gin_configs/demo.gin').resolve()}'\n"
own = "import my_gate\nmoe.MoeLayer.gate = @my_gate.sigmoid_gate\n"
switch = "from m4.model.gates import switch\nmoe.MoeLayer.gate = @switch.switch\n"
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
for name, text in (("sigmoid_gate", own), ("switch", switch)):
    (here / f"{name}.gin").write_text(f"{start}{text}{SMALL}", encoding="utf-8")
    run = m4.train(
        here / f"{name}.gin", model_dir=here / name,
        bindings=[f"experiment.Data.data_dir = '{here / 'data'}'"],  # one corpus for both
    )  # fmt: skip
    rows = [row for row in run.metrics if "nll" in row]
    steps = [row["step"] for row in rows]
    left.plot(steps, [row["nll"] for row in rows], label=name)
    right.plot(steps, [row["fraction_tokens_left_behind"] for row in rows], label=name)
left.set(title="loss", xlabel="step")
right.set(title="tokens left behind", xlabel="step", ylim=(0, None))
left.legend(frameon=False)
plt.show()

# %% [markdown]
# Eighty steps decide nothing; they show that the gate learns and what it drops. To know, train both configs to their end, with two seeds, and
# compare with intervals: `m4 report sigmoid=RUN1 switch=RUN2 --baseline=RUN2` ([several
# runs](../evaluation.md#several-runs-in-one-report)).
#
# Next: [samplers, sources and metrics of your own](../../examples/mine.py) are as short; [to add a gate to
# m4](../../CONTRIBUTING.md#a-gate), add its file, a case worked out by hand, and a row in the table of gates.
