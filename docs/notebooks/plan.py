# ---
# jupyter:
#   # A notebook as text: VS Code opens it, and Jupyter with jupytext; `make docs` shows it with its results.
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # What a pod plan says
#
# A plan answers before a run: does the model fit, what does a device hold, what does it send? `m4 plan` compiles a training step for
# TPUs or GPUs that are not there ([plans](../pod.md)). This notebook looks at the same things on eight devices that a CPU makes.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

# %% [markdown]
# ## Which device has which part
#
# A sharded array is one array for the program. Its parts lie on devices.


# %%
def draw(axes, array, title):
    """Draws the parts of an array's first and last dimension, with the devices that have each."""
    held = {}
    for shard in array.addressable_shards:
        ends = [index.indices(size)[:2] for index, size in zip(shard.index, array.shape)]
        held.setdefault((ends[0], ends[-1]), []).append(shard.device.id)
    for ((top, bottom), (left, right)), ids in held.items():
        colour = plt.get_cmap("Pastel1")(min(ids) % 8)
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, fc=colour, ec="white"))
        name = "all" if len(ids) == 8 else " ".join(map(str, sorted(ids)))
        axes.text(
            (left + right) / 2, (top + bottom) / 2, name, ha="center", va="center", fontsize=8
        )
    rows, columns = array.shape[0], array.shape[-1]
    axes.set(xlim=(0, columns), ylim=(rows, 0), title=title, xticks=[0, columns], yticks=[0, rows])


# %%
from m4.parallel.sharding import mesh_split, replicate, split

x_BM = split(jnp.ones((16, 8)), 0, 8)  # rows, that is sentences
w_MF = replicate(jnp.ones((8, 32)))  # a weight of data parallelism
mesh = np.arange(8).reshape(4, 2)
w2_MF = mesh_split(jnp.ones((8, 32)), mesh, [1, 0])  # over both dimensions of a 4 x 2 mesh
w_EMF = split(jnp.ones((8, 8, 32)), 0, 8)  # eight experts
figure, four = plt.subplots(1, 4, figsize=(9, 2.6), layout="constrained")
draw(four[0], x_BM, "rows [B, M]")
draw(four[1], w_MF, "replicated [M, F]")
draw(four[2], w2_MF, "4 x 2 [M, F]")
draw(four[3], w_EMF, "experts [E, .., F]")

# %% [markdown]
# ## Annotations, and what the compiler makes of them
#
# As in the GShard paper, a model is written for one huge device; a few annotations shard some arrays, and the compiler infers the rest
# and inserts the communication. Here a feed-forward layer lies over the 4 x 2 mesh:

# %%
from m4.plan.hlo import collectives, summary


@jax.jit
def feed_forward(x_BLM, in_MF, out_FM):
    in_MF = mesh_split(in_MF, mesh, [0, 1])
    out_FM = mesh_split(out_FM, mesh, [1, 0])
    hidden_BLF = jax.nn.relu(jnp.einsum("BLM,MF->BLF", x_BLM, in_MF))
    hidden_BLF = mesh_split(hidden_BLF, mesh, [0, -1, 1])
    return mesh_split(jnp.einsum("BLF,FM->BLM", hidden_BLF, out_FM), mesh, [0, -1, 1])


arguments = jnp.ones((4, 2, 8)), jnp.ones((8, 16)), jnp.ones((16, 8))
print(feed_forward(*arguments).sharding.spec)
text = feed_forward.lower(*arguments).compile().as_text() or ""
for kind, total in summary(collectives(text)).items():
    print(f"{total.count} {kind}: {total.sent_bytes:,.0f} bytes sent by a device")

# %% [markdown]
# ## A whole training step, under two strategies
#
# `gin_configs/strategies` has the demo's model in thirteen layouts. Each is compiled here as `m4 plan` compiles it, and asked
# the plan's questions.

# %%
from pathlib import Path

from m4.config import load
from m4.plan import hlo
from m4.plan.program import bytes_by_kind, given_bytes, kept_bytes, train_program

plans = {}
for name in ("data_parallel", "expert_parallel"):
    experiment = load([Path(f"gin_configs/strategies/{name}.gin")]).experiment()
    program = train_program(experiment, jax.devices(), languages=8)
    compiled = program.lowered.compile()
    given = given_bytes(program.params, program.optimizer)
    held = bytes_by_kind(given, compiled.memory_analysis(), kept_bytes(program))
    plans[name] = held, hlo.summary(hlo.collectives(compiled.as_text()))
    print(name)
    for kind, size in ((kind, size) for kind, size in held.items() if size > 2**16):
        print(f"  {kind:20} {size / 2**20:6.1f} MiB on a device")
    for kind, total in plans[name][1].items():
        print(f"  {total.count} {kind}: {total.sent_bytes / 2**20:.1f} MiB sent by a device")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.4), layout="constrained", sharey=True)
for axes, title in ((left, "held, MiB a device"), (right, "sent in a step, MiB a device")):
    for row, (held, sent) in enumerate(plans.values()):
        sizes = held if axes is left else {kind: total.sent_bytes for kind, total in sent.items()}
        start = 0.0
        for kind, size in sizes.items():
            if size > 2**16:
                colour = {k: f"C{i}" for i, k in enumerate([*held, *hlo.KINDS])}[kind]
                axes.barh(row, size / 2**20, left=start, color=colour, label=kind)
                start += size / 2**20
    axes.set(title=title, yticks=range(2), yticklabels=plans)
    labels = dict(zip(*reversed(axes.get_legend_handles_labels())))
    axes.legend(
        labels.values(),
        labels,
        frameon=False,
        fontsize=7,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.15),
        ncol=2,
    )
plt.show()

# %% [markdown]
# With data parallelism every device holds all experts, and gradients of all of them are summed over all devices: an all-reduce. With
# expert parallelism a device holds one expert, whose gradient stays where it is, and tokens travel instead: an all-to-all on
# the way to the experts and one on the way back, forward and backward. More experts on more devices then cost a device nothing, which
# is how the paper trains 600 billion parameters.
#
# ## For a pod
#
# The same for chips, with the TPU's compiler and an estimate of the time, is one command after `make pod`:
#
# ```
# .venv/bin/m4 plan --gin_file=gin_configs/v5e_8.gin --topology=v5e:2x4
# ```
#
# [Plans](../pod.md#the-papers-family) has those of the paper's models: with 2,048 experts and 36 layers 11.88 of a core's 16 GiB.
# [Parallelism](../parallelism.md) has all strategies.
