"""`m4 demo`: all steps: corpus, training, baselines, decoding, scores, ΔBLEU and its plot."""

from m4.eval.decoding.testsets import check_held_out
from m4.eval.report.results import Results
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.jobs.baselines import baselines, baselines_of
from m4.jobs.corpus import open_corpus
from m4.jobs.decode import decode
from m4.jobs.report import report
from m4.jobs.train import train


def demo(experiment: Experiment, *, dense: bool = False) -> Results:
    """Runs all steps; what is there already is kept."""
    # What the baselines need is checked before the training.
    prepare.check_baselines(baselines_of(experiment))
    for one in (experiment, experiment.dense())[: 1 + dense]:
        prepare.check_sizes(one)
    check_held_out(open_corpus(experiment))
    train(experiment)
    if dense:
        train(experiment, dense=True)
    baselines(experiment)
    decode(experiment)
    if dense:
        decode(experiment, dense=True)
    return report(experiment, dense=dense)
