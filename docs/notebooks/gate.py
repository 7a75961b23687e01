# ---
# jupyter:
#   # A notebook as text: VS Code opens it, and Jupyter with jupytext; `make docs` shows it with its results.
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A gate by hand
#
# A mixture-of-experts layer sends each token to few of its experts. The rule that chooses them is the gate. This notebook
# follows Algorithm 1 of GShard ([arXiv 2006.16668](https://arxiv.org/abs/2006.16668)) line by line on twelve tokens, and
# compares it with m4's `top2_gshard`. [Gates](../gates.md) has the other twelve.
#
# A group of S tokens shares the slots of E experts, C slots each. Here S is 12, E is 4, and C is 4, less than the paper's
# 2S/E = 6, so that some choices find their expert full.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

S, E, C = 12, 4, 4
rng = np.random.default_rng(0)
# What a router's matrix would make of the tokens; expert 0 is a favourite.
logits_SE = (rng.normal(size=(S, E)) + [1.3, 0.3, 0.0, -0.3]).astype(np.float32)
coin_key = jax.random.key(0)
coin_S = np.array(jax.random.uniform(coin_key, (1, S)))[0]  # of one group, as m4 draws it


# %% [markdown]
# ## The paper's lines
#
# The number at the end of a line is that of the paper.


# %%
def algorithm_1(logits_SE, coin_S, C):
    S, E = logits_SE.shape
    G_SE = np.zeros((S, E))  # the weight of each expert's output
    slot_SE = np.full((S, E), -1)
    c_E = np.zeros(E, int)  # 1: choices of each expert so far
    g_SE = np.array(jax.nn.softmax(logits_SE))  # 2
    m_E = g_SE.mean(0)  # 3
    best_SE = np.argsort(-g_SE, axis=1)
    for s in range(S):  # 4
        e1, e2 = best_SE[s, :2]  # 5
        g1 = g_SE[s, e1] / (g_SE[s, e1] + g_SE[s, e2])  # 6
        c = c_E[e1]  # 7
        if c < C:  # 8
            G_SE[s, e1], slot_SE[s, e1] = g1, c  # 9
        c_E[e1] = c + 1  # 11: also where the expert is full
    aux_loss = np.mean(c_E / S * m_E)  # 13
    for s in range(S):  # 14
        e1, e2 = best_SE[s, :2]  # 15
        g2 = g_SE[s, e2] / (g_SE[s, e1] + g_SE[s, e2])  # 16
        c = c_E[e2]  # 18
        if c < C and 2 * g2 > coin_S[s]:  # 17, 19
            G_SE[s, e2], slot_SE[s, e2] = g2, c  # 20
        c_E[e2] = c + 1  # 22: also where the coin refused
    return G_SE, slot_SE, aux_loss


G_SE, slot_SE, aux_loss = algorithm_1(logits_SE, coin_S, C)
print(np.round(G_SE, 2))
print("auxiliary loss", round(aux_loss, 4), "; balanced it would be", 1 / E**2)

# %% [markdown]
# All first choices are served before any second one, each in the order of tokens. The second choice tosses a coin: with a weight
# of g2 it asks with probability 2·g2. A row of zeros is a token that no expert works on: the residual connection alone carries it.
#
# ## The same in m4
#
# A gate of m4 returns a plan, `Routing`: expert, slot and weight of each of a token's K choices. It keeps no mask of E x C, and has no
# loop over tokens. Three options make `top2_gshard` the paper's; the defaults are what Lingvo, the paper's code, does.

# %%
from m4.model.gates.top2_gshard import top2_gshard
from m4.model.routing import Tokens

PAPER = {"paper_slot": True, "real_token_means": False, "paper_scale": True}
DEFAULT = {"paper_slot": False, "real_token_means": True, "paper_scale": False}


def plan_of(logits_SE, coin_key, C, **options):
    S, E = logits_SE.shape
    logits_GSE = jnp.asarray(logits_SE)[None]
    tokens = Tokens(lambda name: logits_GSE, jnp.ones((1, S), bool), rng=coin_key, train=True)
    return top2_gshard(tokens, E, lambda choices: C, **options)


def weights_SE(plan):
    chosen_SKE = np.eye(plan.num_experts)[plan.expert_GSK[0]]
    return (chosen_SKE * plan.weight_GSK[0][..., None]).sum(1)


plan = plan_of(logits_SE, coin_key, C, **PAPER)
np.testing.assert_allclose(weights_SE(plan), G_SE, atol=1e-6)
np.testing.assert_allclose(plan.aux_loss, aux_loss, rtol=1e-6)
default = plan_of(logits_SE, coin_key, C, **DEFAULT)
print(
    "expert, slot and weight of token 0:",
    plan.expert_GSK[0, 0],
    plan.position_GSK[0, 0],
    plan.weight_GSK[0, 0],
)
print("auxiliary loss by default:", float(default.aux_loss), "= the paper's times E²")

# %% [markdown]
# ## The slots, drawn
#
# A column is an expert's buffer, a cell one slot with its token; strong colours are first choices. In the paper a second choice that
# the coin refuses uses a slot up (line 22), in Lingvo it does not: there are fewer holes.


# %%
def draw(axes, plan, title):
    for e in range(plan.num_experts):
        for c in range(plan.capacity):
            axes.add_patch(Rectangle((e, c), 0.9, 0.9, fill=False, edgecolor="#bbbbbb"))
    for s, k in np.ndindex(plan.position_GSK[0].shape):
        e, c = int(plan.expert_GSK[0, s, k]), int(plan.position_GSK[0, s, k])
        if c >= 0:
            axes.add_patch(Rectangle((e, c), 0.9, 0.9, color="#0072b2", alpha=(0.8, 0.35)[k]))
            axes.text(e + 0.45, c + 0.45, f"{s}", ha="center", va="center")
    lost = [s for s in range(S) if (plan.position_GSK[0, s] < 0).all()]
    axes.set(xlim=(-0.1, plan.num_experts), ylim=(plan.capacity, -0.1), title=title, ylabel="slot")
    axes.set_xticks(
        np.arange(plan.num_experts) + 0.45, [f"expert {e}" for e in range(plan.num_experts)]
    )
    axes.set_yticks(np.arange(plan.capacity) + 0.45, range(plan.capacity))
    axes.set_xlabel(f"without any slot: tokens {lost}")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


figure, both = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
draw(both[0], plan, "Algorithm 1")
draw(both[1], default, "top2_gshard's defaults")

# %% [markdown]
# ## Capacity and overflow
#
# The capacity decides what is lost. A factor of 1 is the paper's C = 2S/E; m4 trains with 1.25 and evaluates without a limit, so
# that a translation does not depend on its batch. Here 1,024 tokens choose among 8 experts, by a router that knows
# nothing yet and by one that prefers some experts.

# %%
from m4.model.routing import expert_capacity

FACTORS = np.linspace(0.25, 2.5, 10)
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, slope, colour in (
    ("new router", 0.0, "#009e73"),
    ("router with favourites", 1.5, "#d55e00"),
):
    many_SE = rng.normal(size=(1024, 8)).astype(np.float32) + np.linspace(
        slope, 0, 8, dtype=np.float32
    )
    plans = [plan_of(many_SE, coin_key, expert_capacity(1024, 8, f), **DEFAULT) for f in FACTORS]
    for key, style in (
        ("first_overflow", "-"),
        ("second_overflow", "--"),
        ("fraction_tokens_left_behind", ":"),
    ):
        label = f"{name}: {key.replace('_', ' ')}"
        axes.plot(FACTORS, [float(p.metrics[key]) for p in plans], style, color=colour, label=label)
axes.set(
    xlabel="capacity factor (1: the paper's 2S/E)", ylabel="share of the tokens", ylim=(0, None)
)
axes.legend(frameon=False, fontsize=7)
plt.show()

# %% [markdown]
# An even load needs few spare slots; favourites need many, and that is what the auxiliary loss is for. The three measures are in
# `metrics.jsonl` of every run ([sown metrics](../model.md#sown-metrics)).
#
# Next: [the layer](../../m4/model/moe.py) around the gate, or [a gate of your own](own_gate.py).
