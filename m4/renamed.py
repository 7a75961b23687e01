"""Old names of settings and modules, and T5X's where m4 has another: refused, with the new name.

A line stays here for one release.
"""

_MODULES = {
    "m4.core.mesh": "m4.parallel.mesh",
    "m4.core.sharding": "m4.parallel.sharding",
    "m4.data.cache": "m4.data.corpus",
    "m4.data.clean": "m4.data.cleaning.clean",
    "m4.data.samplers.sides": "m4.data.samplers.direction_weights",
    "m4.train.baselines": "m4.experiment (a baseline is an Experiment under a gin scope)",
    "m4.train.loop": "m4.train.trainer (settings: experiment.Training)",
}

_SETTINGS = {
    "jobs.Setup.model_dir": "experiment.Experiment.model_dir",
    "jobs.Setup.model": "experiment.Experiment.model",
    "jobs.Setup.decoding": "experiment.Experiment.decoding",
    "jobs.Setup.corpus": "experiment.Data.corpus",
    "jobs.Setup.sampler": "experiment.Data.sampler",
    "jobs.Setup.sample_by": "experiment.Data.sample_by",
    "jobs.Setup.stream": "experiment.Data.stream",
    "jobs.Setup.about": "experiment.Data.about",
    "jobs.Setup.high": "experiment.ResourceLevels.high_resource_from",
    "jobs.Setup.low": "experiment.ResourceLevels.low_resource_below",
    "jobs.Setup.mixture": "corpus.CorpusSpec.mixture",
    "jobs.Setup.lengths": "corpus.CorpusSpec.lengths",
    "jobs.Setup.train": "experiment.Training (settings of the training)",
    "jobs.Setup.mesh": "experiment.Training.mesh",
    "jobs.Setup.total_steps": "experiment.Training.total_steps",
    "jobs.Setup.batch_size": "experiment.Training.batch_size",
    "jobs.Setup.seed": "experiment.Training.seed",
    "jobs.Setup.dev_period": "experiment.Training.dev_period",
    "jobs.Setup.dev_pairs": "experiment.Training.dev_pairs",
    "jobs.Setup.baselines": "experiment.Experiment.baselines",
    "jobs.Setup.baselines_dir": "experiment.Baselines.folder",
    "jobs.Setup.report": "experiment.Decoding.metrics",
    "report.report.metrics": "experiment.Decoding.metrics",
    "jobs.Setup": "experiment.Experiment",
    "loop.train.accumulate": "experiment.Training.grad_accum_steps",
    "loop.train.keep": "experiment.Training.keep_checkpoints",
    "loop.train.zero": "experiment.Training.fsdp_axes",
    "loop.train.rules": "experiment.Training.extra_axis_rules",
    "baselines.Recipe": "experiment.Experiment under a scope (docs/evaluation.md)",
    "sides.Sides.out_of_english": "direction_weights.DirectionWeights.from_english",
    "transformer.Transformer.microbatches": "transformer.Transformer.pipeline_microbatches",
    "transformer.Transformer.decoder_gate": "transformer.Transformer.decoder_moe = "
    "@decoder/moe.MoeLayer, decoder/moe.MoeLayer.gate",
    "transformer.Transformer.transport": "moe.MoeLayer.dispatch",
    "transformer.Transformer.expert_activations": "moe.MoeLayer.activations",
    "moe.MoeLayer.transport": "moe.MoeLayer.dispatch",
    "moe.MoeLayer.width": "moe.MoeLayer.mlp_width",
    "jsonl.Jsonl.foreign_field": "jsonl.Jsonl.translation_field",
    "huggingface.HuggingFace.foreign_field": "huggingface.HuggingFace.translation_field",
    "topk.topk.seat_order": "topk.topk.slot_order",
    "top2_gshard.top2_gshard.paper_seat": "top2_gshard.top2_gshard.paper_slot",
    "cache.prepare.source_length": "corpus.CorpusSpec.lengths",
    "cache.prepare.target_length": "corpus.CorpusSpec.lengths",
    "cache.prepare.mixture_name": "corpus.CorpusSpec.mixture",
    "report.report": "none: levels are experiment.ResourceLevels, metrics experiment.Decoding",
    "DATA_DIR": "TEXT_DIR (the folder of the text; the built corpus is experiment.Data.data_dir)",
    # T5X's macros.
    "EVAL_PERIOD": "experiment.Training.dev_period",
    "EVAL_STEPS": "experiment.Training.dev_pairs",
    "CHECKPOINT_PERIOD": "experiment.Training.checkpoint_period",
    "SAVING_PERIOD": "experiment.Training.checkpoint_period",
    "RANDOM_SEED": "experiment.Training.seed",
    "LABEL_SMOOTHING": "experiment.Training.label_smoothing",
    "Z_LOSS": "experiment.Training.z_loss",
    "LOSS_NORMALIZING_FACTOR": "none (the loss is a mean over target tokens)",
    "USE_CACHED_TASKS": "none (m4 always caches: experiment.Data.corpus)",
    "EVALUATOR_USE_MEMORY_CACHE": "none",
}

_MOE = ("num_experts", "group_tokens", "train_capacity_factor", "eval_capacity_factor",
        "decode_capacity_factor", "capacity_rule", "gate")  # fmt: skip
_SETTINGS |= {f"transformer.Transformer.{name}": f"moe.MoeLayer.{name}" for name in _MOE}

# Whole classes and functions whose parameters kept their names.
_OWNERS = {
    "jobs.Decoding": "experiment.Decoding",
    "optimizer.rsqrt": "schedules.rsqrt",
    "loop.train": "experiment.Training",
    "cache.prepare": "corpus.CorpusSpec",
    "sides.Sides": "direction_weights.DirectionWeights",
}


def renamed(name: str) -> str | None:
    """The new name of a module, setting or macro; None: it has not been renamed."""
    if found := _MODULES.get(name) or _SETTINGS.get(name):
        return found
    owner, _, parameter = name.rpartition(".")
    if owner in _OWNERS:
        return f"{_OWNERS[owner]}.{parameter}"
    return _OWNERS.get(name)
