"""`m4 data list` and `m4 data remove`."""

from pathlib import Path

from m4.data.corpus import CorpusSpec
from m4.experiment import Data, Experiment, Training
from m4.jobs.corpus import keep_vocabulary
from m4.train.optimizer import adamw
from tests.command_line import m4
from tests.data.corpus import Made


def test_corpora_are_listed_with_their_runs_and_removed_without(tmp_path: Path) -> None:
    made = []
    for pairs in (40, 41):
        spec = CorpusSpec(source=Made({"gl": pairs}), vocabulary_size=400)
        made.append(spec.build(tmp_path / "data"))
    used, left = made
    experiment = Experiment(str(tmp_path / "run"), Data(spec), Training(8, 8, adamw))
    keep_vocabulary(experiment, used)
    runs = ("--runs", tmp_path / "run", tmp_path / "nothing")
    said = m4("data", "list", tmp_path / "data", *runs)
    head, *rows = [line.split("\t") for line in said.out.splitlines()]
    assert head[:3] == ["corpus", "languages", "pairs"]
    found = {row[0]: row for row in rows}
    assert {*found} == {str(used.folder), str(left.folder)}
    assert found[str(used.folder)][1:3] == ["2", "40"]
    assert found[str(used.folder)][-1] == str(tmp_path / "run")
    assert found[str(left.folder)][-1] == ""
    both = ("data", "remove", left.folder, used.folder)
    assert f"{used.folder}: {tmp_path}/run was trained with it" in m4(*both, *runs).mistake
    assert "not a corpus" in m4("data", "remove", tmp_path / "run").mistake
    assert left.folder.is_dir()
    assert m4("data", "remove", left.folder, *runs).out == f"removed {left.folder}\n"
    assert [*(tmp_path / "data").iterdir()] == [used.folder]
    assert "no such folder" in m4("data", "list", tmp_path / "elsewhere").mistake
