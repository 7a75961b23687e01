"""A config is an object: places, scopes, plain values; a saved one is data."""

import functools
import importlib
import pickle
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import m4
from m4 import config
from m4.config import Config, ConfigError
from m4.data.sources.seqio_tasks import SeqioTasks
from m4.experiment import changes, identity
from m4.model.gates.switch import switch
from m4.settings import InputError, SavedText, allowed_modules, is_checked
from tests.command_line import TINY, experiment_of

HERE = "MODEL_DIR = 'x'"


def changed(tmp_path: Path, *lines: str) -> Path:
    """Writes tiny.gin with more lines at its end."""
    path = tmp_path / "changed.gin"
    path.write_text("\n".join([TINY.read_text(encoding="utf-8"), *lines, ""]), encoding="utf-8")
    return path


def test_a_scope_holds_for_everything_below_it() -> None:
    experiment = experiment_of(
        TINY, HERE, "bilingual/low/schedules.rsqrt.peak = 0.5",
        "bilingual/transformer.Transformer.width = 24",
    )  # fmt: skip
    assert experiment.baselines is not None
    found = {level: identity(experiment.baselines.of(level)) for level in ("high", "medium", "low")}

    def peak(level: str) -> float:
        return found[level]["training"]["optimizer"]["optimizer"]["schedule"]["peak"]

    assert (peak("low"), peak("high")) == (0.5, 1.2e-2)
    assert {level: one["model"]["width"] for level, one in found.items()} == dict.fromkeys(
        found, 24
    )
    # The multilingual model is not within the scope.
    assert identity(experiment)["model"]["width"] == 16


def test_an_experiment_is_made_of_plain_objects_and_crosses_processes() -> None:
    experiment = experiment_of(TINY, HERE)
    assert isinstance(experiment.model, functools.partial)
    again = pickle.loads(pickle.dumps(experiment))
    assert identity(again) == identity(experiment)


def test_several_configs_in_one_process_do_not_meet() -> None:
    a = experiment_of(TINY, HERE, "BATCH_SIZE = 4")
    b = experiment_of(TINY, HERE, "BATCH_SIZE = 16")
    assert (a.training.batch_size, b.training.batch_size) == (4, 16)


def test_a_saved_config_is_the_same_experiment(tmp_path: Path) -> None:
    made = config.load([TINY], [HERE, "BATCH_SIZE = 4"])
    experiment = made.experiment()
    for text in (made.text(), made.operative_text()):
        (tmp_path / "config.gin").write_text(text, encoding="utf-8")
        again = config.load([tmp_path / "config.gin"], allowed_modules=())
        assert identity(again.experiment()) == identity(experiment)


@pytest.mark.parametrize(
    "command", ["['scorer', 'x']", "('scorer', 'x')", "(['scorer'], {'x': ('y',)})"]
)
def test_every_text_of_a_saved_config_is_known_as_such(tmp_path: Path, command: str) -> None:
    """In lists, tuples and dictionaries, however deep: none runs code."""
    binding = f"about = {command}\n"
    (tmp_path / "config.gin").write_text(TINY.read_text(encoding="utf-8") + binding)
    bindings = Config(allowed_modules=())
    bindings.read_file(str(tmp_path / "config.gin"))

    def texts(value: Any) -> Iterator[Any]:
        parts = [*value.items()] if isinstance(value, dict) else value
        for part in () if isinstance(value, str) else parts:
            yield from texts(part)
        if isinstance(value, str):
            yield value

    found = [*texts(bindings._macros["about"][0])]
    assert len(found) >= 2
    assert {type(text) for text in found} == {SavedText}


def test_an_experiment_made_in_python_has_a_config_too(tmp_path: Path) -> None:
    experiment = experiment_of(TINY, HERE)
    text = config.of_experiment(experiment).text()
    (tmp_path / "config.gin").write_text(text, encoding="utf-8")
    again = config.load([tmp_path / "config.gin"], allowed_modules=()).experiment()
    assert identity(again) == identity(experiment)
    # Whatever the lines are called, and whether a default is written out.
    assert changes(experiment, again) == {}
    other = experiment_of(TINY, HERE, "schedules.rsqrt.peak = 3", "experiment.Decoding.beams = 8")
    assert changes(again, other) == {"training.optimizer.schedule.peak": ["0.001", "3"]}


def test_what_may_change_is_what_is_marked_and_all_below_it() -> None:
    made = config.load([TINY], [HERE, "mesh.make_mesh.data = -1"])
    made.experiment()
    for name in ("experiment.Training.total_steps", "mesh.make_mesh.data"):
        assert name in made.mutable
    assert "experiment.Decoding.beams" in made.mutable
    assert "bilingual/schedules.rsqrt.peak" not in made.settings  # below a level's own scope
    assert "bilingual/high/schedules.rsqrt.peak" in made.mutable
    assert "schedules.rsqrt.peak" not in made.mutable
    assert "transformer.Transformer.width" not in made.mutable


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("schedules.rsqrt.peek = 1", "schedules.rsqrt has no parameter peek; did you mean peak?"),
        ("experiment.Training.aux_loss = 1", "did you mean aux_loss_factor?"),
        ("experimen.Training.seed = 2", "called experimen; did you mean experiment?"),
        ("schedules.rsqrt.peak = small", "cannot be read: text needs quotes"),
        ("schedules.rsqrt.peak = 'x'", "schedules.rsqrt.peak = 'x': must be a number"),
        ("TRAIN_STEPS = -1", "experiment.Training.total_steps = -1 (TRAIN_STEPS): must be"),
        ("BATCH_SIZE = 10000000000000", "(BATCH_SIZE): must be a whole number from 1 to 1,048,576"),
        ("STEPS = 3", "STEPS is set and nothing uses it; did you mean TRAIN_STEPS?"),
        ("EVAL_PERIOD = 3", "m4's name is experiment.Training.dev_period"),
        ("learned.Learned.rate = 1", "called learned; add: from m4.data.samplers import learned"),
        ("optimizer.adamw.schedule = @optimizer.rsquare", "m4.train.optimizer has no rsquare"),
        ("cldr.Cldr.sizes = {'es': 3]", "cannot be read"),
        ("cldr.Cldr.sizes = 'x'", "cldr.Cldr.sizes = 'x': must be a dictionary, text that is not"),
        ("a/b/c", "cannot be read"),
    ],
)
def test_a_mistake_has_its_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    path = changed(tmp_path, line)
    number = path.read_text(encoding="utf-8").splitlines().index(line) + 1
    with pytest.raises(ConfigError) as raised:
        experiment_of(path, HERE)
    assert said in str(raised.value)
    assert f"{path} line {number}: " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_includes_itself_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, f"include '{tmp_path / 'changed.gin'}'")
    with pytest.raises(ConfigError, match=r"changed.gin: includes itself$"):
        experiment_of(path, HERE)


def test_a_scope_holds_within_other_scopes() -> None:
    """Within a baseline, whose scopes come first; a longer scope replaces a shorter one."""
    experiment = experiment_of(
        TINY, HERE,
        "experiment.Experiment.decoding = @own/experiment.Decoding()",
        "own/experiment.Decoding.beams = 7",
        "bilingual/experiment.Decoding.alpha = 0.5",
        "bilingual/low/own/experiment.Decoding.beams = 3",
    )  # fmt: skip
    assert experiment.baselines is not None
    found = [experiment.decoding, experiment.baselines.high.decoding]
    assert [(one.beams, one.alpha) for one in found] == [(7, 0.6), (7, 0.5)]
    assert experiment.baselines.low.decoding.beams == 3


def test_run_files_of_a_user_are_found_and_the_saved_config_is_complete(tmp_path: Path) -> None:
    """Run files as T5X has them: found in --gin_search_paths, one including the other."""
    runs, models = tmp_path / "runs", tmp_path / "models"
    for folder in (runs, models):
        folder.mkdir()
    (models / "model.gin").write_text(TINY.read_text())
    (runs / "base.gin").write_text("include 'model.gin'\nTRAIN_STEPS = 7\n")
    (runs / "mine.gin").write_text("include 'base.gin'\nBATCH_SIZE = 16\n")
    made = config.load(
        ["mine.gin"], ["MODEL_DIR = 'run'"], folders=[str(tmp_path), str(runs), str(models)]
    )
    training = made.experiment().training
    assert (training.total_steps, training.batch_size) == (7, 16)
    saved = tmp_path / "config.gin"
    saved.write_text(made.text())
    assert "include" not in saved.read_text()
    again = config.load([saved], allowed_modules=())
    assert again.experiment().training.total_steps == 7
    assert again.settings == made.settings
    with pytest.raises(ConfigError, match=r"base.gin line 1.*: model.gin: no such file in"):
        config.load(["mine.gin"], ["MODEL_DIR = 'run'"], folders=[str(runs)])


def test_text_for_a_macro_of_text_needs_no_quotes() -> None:
    assert experiment_of(TINY, "MODEL_DIR = runs/a b").model_dir == "runs/a b"
    assert experiment_of(TINY, "MODEL_DIR = '7'").model_dir == "7"


@pytest.mark.parametrize(
    "value", ["['en-gl', 'fr-wo']", '[ "en-gl","fr-wo"]', "('en-gl', 'fr-wo')"]
)
def test_a_macro_of_text_may_become_a_list_of_texts(tmp_path: Path, value: str) -> None:
    path = changed(tmp_path, "CHOSEN = 'direct'", "corpus.CorpusSpec.mixture = %CHOSEN")
    made = experiment_of(path, "MODEL_DIR = 'x'", f"CHOSEN = {value}")
    assert [*made.data.corpus.mixture] == ["en-gl", "fr-wo"]


def test_a_binding_may_be_an_import() -> None:
    lines = ("from m4.model.gates import switch", "moe.MoeLayer.gate = @switch.switch")
    model = experiment_of(TINY, "MODEL_DIR = runs/a", *lines).model(vocab_size=400)
    assert model.encoder_experts is not None
    assert model.encoder_experts.gate is switch


def test_a_users_module_next_to_the_gin_file_is_found_and_remembered(tmp_path: Path) -> None:
    (tmp_path / "mine_of_tests.py").write_text(
        "def halves(sizes):\n    return {name: 1 / len(sizes) for name in sizes}\n"
    )
    path = changed(
        tmp_path, "import mine_of_tests", "experiment.Data.sampler = @mine_of_tests.halves"
    )
    made = config.load([path], [HERE])
    assert made.experiment().data.sampler({"a": 1, "b": 2}) == {"a": 0.5, "b": 0.5}
    assert made.modules == {"mine_of_tests": str(tmp_path)}
    (tmp_path / "config.gin").write_text(made.text(), encoding="utf-8")
    with pytest.raises(ConfigError, match="allow_module=mine_of_tests"):
        config.load([tmp_path / "config.gin"], allowed_modules=())
    allowed = config.load([tmp_path / "config.gin"], allowed_modules=["mine_of_tests"])
    assert allowed.experiment().data.sampler({"a": 1}) == {"a": 1.0}


@pytest.mark.parametrize(
    "lines",
    [
        ["import os", "experiment.Data.about = @os.system()"],
        ["from os import path as corpus"],
        ["from m4.parallel import distributed", "distributed.os.system.command = 'touch here'"],
        ["from m4.storage import files", "experiment.Data.about = @files.write_text()"],
        ["include '/etc/passwd'"],
    ],
)
def test_a_strangers_run_folder_runs_nothing(tmp_path: Path, lines: list[str]) -> None:
    """Robust against a config.gin that imports and calls what it likes."""
    saved = config.load([TINY], [HERE])
    saved.experiment()
    text = "\n".join([saved.text(), *lines])
    (tmp_path / "config.gin").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"refused|not part of m4|includes no other file"):
        m4.load(tmp_path)


def test_a_strangers_config_does_not_redirect_the_run(tmp_path: Path) -> None:
    """--model_dir decides where is written, whatever the saved config says."""
    made = config.load([TINY], [HERE])
    made.experiment()
    victim = f"experiment.Experiment.model_dir = '{tmp_path / 'victim'}'"
    text = made.text().replace("experiment.Experiment.model_dir = %MODEL_DIR", victim)
    assert victim in text
    text += "experiment.Data.about = %MODEL_DIR\n"
    (tmp_path / "config.gin").write_text(text, encoding="utf-8")
    assert m4.load(tmp_path).experiment.model_dir == str(tmp_path)
    again = config.load([tmp_path / "config.gin"], model_dir="y", allowed_modules=())
    assert again.experiment().model_dir == "y"


def test_a_saved_config_names_no_other_folder_to_write_to(tmp_path: Path) -> None:
    made = config.load([TINY], [HERE, "experiment.Baselines.folder = '../victim'"])
    made.experiment()
    (tmp_path / "config.gin").write_text(made.text(), encoding="utf-8")
    saved = m4.load(tmp_path).experiment.baselines
    assert saved is not None
    assert isinstance(saved.folder, SavedText)  # which the job reads, and never writes
    given = ["experiment.Baselines.folder = 'kept'"]
    again = config.load([tmp_path / "config.gin"], given, allowed_modules=()).experiment()
    assert again.baselines is not None
    assert not isinstance(again.baselines.folder, SavedText)


@pytest.mark.parametrize(
    ("line", "by"),
    [
        ("stream.Stream.batch_rows = 4", "experiment.Training.batch_size"),
        ("stream.Stream.source_length = 8", "corpus.CorpusSpec.lengths"),
        ("stream.Stream.cache = 'x'", "experiment.Data.corpus"),
        ("stream.Stream.phases = {'en-gl': 1.0}", "experiment.Data.sampler"),
        ("transformer.Transformer.vocab_size = 999", "the vocabulary"),
        ("bilingual/transformer.Transformer.directions = 2", "corpus.CorpusSpec.mixture"),
        ("moe.MoeLayer.causal = True", "the layer's place"),
        ("mesh.make_mesh.devices = 3", "the machine"),
    ],
)
def test_what_m4_gives_itself_is_no_setting(line: str, by: str, tmp_path: Path) -> None:
    """It would be overridden without a word, or be given twice, which ends in a traceback."""
    path = changed(
        tmp_path, "from m4.data.stream import stream", "experiment.Data.stream = @stream.Stream"
    )
    said = f"{line.partition(' = ')[0].rpartition('/')[2]}: m4 itself gives it, it is no setting"
    with pytest.raises(ConfigError, match=re.escape(said) + rf" \(what decides it: {by}"):
        config.load([path], [HERE, line])
    made = config.load([path], [HERE])
    made.experiment()
    assert line.partition(" = ")[0] not in made.operative_text()
    with pytest.raises(
        ConfigError, match=r"Stream\(\): m4 makes it, with its cache: write it with"
    ):
        config.load([path], [HERE, "experiment.Data.stream = @stream.Stream()"]).experiment()


@pytest.mark.parametrize(
    "lines",
    [
        ["corpus.CorpusSpec.source = @seqio_tasks.SeqioTasks"],
        ["corpus.CorpusSpec.source = @seqio_tasks.SeqioTasks()"],
        ["corpus.CorpusSpec.cleaning = @clean.Cleaning()",
         "clean.Cleaning.stages = [@overlap.Overlap()]",
         "overlap.Overlap.sources = {'flores': @seqio_tasks.SeqioTasks()}"],
    ],
)  # fmt: skip
def test_a_saved_config_imports_no_module_wherever_it_is_named(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strangers.py").write_text("raise SystemExit('its code runs')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(SeqioTasks, "_seqio", None)  # whose import takes seconds
    path = changed(
        tmp_path, "from m4.data.sources import seqio_tasks", "from m4.data.cleaning import clean",
        "from m4.data.cleaning import overlap", "MODULE = 'strangers'",
        "seqio_tasks.SeqioTasks.mixture_or_task_name = 'x'",
        "seqio_tasks.SeqioTasks.mixture_or_task_module = %MODULE", *lines,
    )  # fmt: skip

    def read(*allowed: str) -> None:
        made = config.load([path], [HERE], allowed_modules=allowed)
        made.experiment().data.corpus.identity()

    with pytest.raises(InputError, match="--allow_module=strangers"):
        read()
    with pytest.raises(SystemExit, match="its code runs"):
        read("strangers")


def test_a_saved_config_allows_another_run_no_module(tmp_path: Path) -> None:
    """A run that it begins from imports what the user allows, from where the user says."""
    path = changed(
        tmp_path,
        "from m4.train import initial",
        "experiment.Training.initial = @initial.InitialModel()",
        "initial.InitialModel.run = 'other'",
        "initial.InitialModel.allow_modules = ['os', 'mine=/strangers']",
    )

    def allowed(*names: str) -> dict[str, str]:
        made = config.load([path], [HERE], allowed_modules=names).experiment()
        assert made.training.initial is not None
        return allowed_modules(made.training.initial.allow_modules)

    assert allowed() == {}
    assert allowed("mine") == {"mine": ""}
    assert allowed("mine=own", "x") == {"mine": "own"}
    own = config.load([path], [HERE]).experiment().training.initial
    assert own is not None
    assert allowed_modules(own.allow_modules) == {"os": "", "mine": "/strangers"}


def test_what_a_saved_config_may_name_does_nothing_but_compute() -> None:
    """Every function and class that carries the mark is in a room of settings; none writes."""
    rooms = (
        "m4.experiment", "m4.data.corpus", "m4.data.sources.", "m4.data.testsets",
        "m4.data.samplers.", "m4.data.cleaning.", "m4.data.stream.stream", "m4.model.",
        "m4.train.optimizer",
        "m4.train.schedules", "m4.train.average", "m4.train.early_stopping", "m4.train.training",
        "m4.train.initial", "m4.train.bad_steps", "m4.train.multitask.",
        "m4.eval.decoding.settings", "m4.eval.decoding.sampling", "m4.eval.metrics.",
        "m4.eval.scoring.levels", "m4.parallel.mesh",
    )  # fmt: skip
    found = set()
    for module in pkgutil.walk_packages(m4.__path__, "m4."):
        # The tasks of seqio import TensorFlow, for ten seconds, and mark nothing.
        if module.name not in ("m4.__main__", "m4.data.tasks", "m4.t5x_tasks"):
            for one in vars(importlib.import_module(module.name)).values():
                if getattr(one, "__module__", "").startswith("m4.") and is_checked(one):
                    found.add(f"{one.__module__}.{one.__qualname__}")
    assert len(found) > 50
    assert not [name for name in found if not name.startswith(rooms)]
