"""Legend of axes: a letter for each, and the table from logical axes to mesh axes.

Letters, in names such as `x_BLM` and in einsum strings:
  B batch        L source length   T target length   M model width   N heads       D head width
  F feed-forward V vocabulary      G groups          S tokens/group  E experts     C capacity
  K choices a token  J choices of a group (S K)   P slots of a group (E C)
  Q query positions, R key positions (either L or T)

Without heads, targets or keys, D is also directions, T tasks, N blocks of b rows, R rows and X
devices along an axis. GShard (arXiv 2006.16668, Algorithm 2) writes H for F.
"""

# Logical axis -> mesh axis. The names on the left are those of T5X's rules, so that stock T5X can
# shard and factor every parameter; None means replicated. The first rule that fits wins.
LOGICAL_AXIS_RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    # Tokens are split over all devices, also over those that share an expert.
    ("batch", ("data", "fsdp", "node", "expert")),
    ("expert", ("node", "expert")),
    # Groups of dispatched tokens: the part of "batch" left by the experts' axes. The name is
    # flaxformer's, which T5X's rules know.
    ("expert_replicas", ("data", "fsdp")),
    ("vocab", "model"),
    ("mlp", "model"),
    ("expert_mlp", "model"),
    ("heads", "model"),
    ("joined_kv", "model"),
    # Layers of scanned stacks are at their stage of the pipeline.
    ("layers", "stage"),
    ("embed", None),
    # M in experts. T5X's rules shard "embed" over "model" there, which would leave F unsharded.
    ("mlp_embed", None),
    ("kv", None),
    ("length", None),
    ("relpos_buckets", None),
    ("layer_norm_scale", None),
    ("unmodeled", None),
)

# Outermost first: neighbours along "model" are the nearest devices. Stages send little (one
# activation per microbatch), so they may be farthest apart. "node" is the slow part of the
# experts' axis, between machines; "expert" is the fast part, inside one.
MESH_AXES = ("stage", "data", "fsdp", "node", "expert", "model")
