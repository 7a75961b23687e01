import json
import shutil
from pathlib import Path

import pytest

from m4.data.sources import Pair
from m4.data.sources.tfds import Tfds
from m4.settings import InputError
from tests.data.corpora import prepare_tfds

pytestmark = pytest.mark.slow  # TensorFlow's import

PAIRS = [{"en": f"day {number}", "gl": f"día {number}"} for number in range(30)]
TALKS = [
    {"en": "day", "gl": ["día", "xornada"], "pt-br": "dia"},
    {"en": ["night", "night time"], "pt-br": "noite"},
    {"gl": "sen inglés", "pt-br": "sem inglês"},
]
MANY = [{"en": f"day {number}", "pt-br": f"dia {number}"} for number in range(30)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tfds")
    prepare_tfds(folder, "en-gl", ["en", "gl"], {"train": PAIRS[:2]})
    prepare_tfds(folder, "en-gl", ["en", "gl"], {"train": PAIRS, "validation": PAIRS[:1]}, "1.10.0")
    more = {"train": [{"en": "night", "gl": "noite", "pt-br": "noite br"}]}
    prepare_tfds(folder, "more", ["en", "gl", "pt-br"], more)
    prepare_tfds(folder, "talks", None, {"train": TALKS, "validation": TALKS[:1]})
    prepare_tfds(folder, "many", None, {"train": MANY})
    prepare_tfds(folder, "de-gl", ["de", "gl"], {"train": [{"de": "Tag", "gl": "día"}]})
    return folder


def test_examples_that_say_their_languages(data_dir: Path) -> None:
    source = Tfds(["made_dataset/talks"], data_dir, splits={"train": "train", "dev": "validation"})
    assert source.language_pairs() == ["en-gl", "en-pt_br"]
    assert sorted(source.pairs("en-gl", "train")) == [Pair("day", "día"), Pair("day", "xornada")]
    assert sorted(source.pairs("en-pt_br", "train")) == [Pair("day", "dia"), Pair("night", "noite")]
    assert list(source.pairs("en-gl", "dev")) == [Pair("day", "día"), Pair("day", "xornada")]
    assert list(source.pairs("en-gl", "test")) == []
    assert source.reading.skipped == {("made_dataset/talks train", "no English side"): 1}


def test_several_datasets_of_a_language_follow_each_other(data_dir: Path) -> None:
    datasets = [f"made_dataset/{name}" for name in ("en-gl", "more", "talks")]
    source = Tfds(datasets, data_dir, splits={"train": "train"})
    found = list(source.pairs("en-gl", "train"))
    assert sorted(found[:30]) == sorted(Pair(pair["en"], pair["gl"]) for pair in PAIRS)
    assert found[30] == Pair("night", "noite")
    assert sorted(found[31:]) == [Pair("day", "día"), Pair("day", "xornada")]
    assert source.language_pairs() == ["en-gl", "en-pt_br"]
    assert next(source.pairs("en-pt_br", "train")) == Pair("night", "noite br")


def test_the_newest_version_and_a_named_one(data_dir: Path) -> None:
    def size(name: str, part: str = "train") -> int:
        return len(list(Tfds([name], data_dir, splits={"train": part}).pairs("en-gl", "train")))

    assert size("made_dataset/en-gl") == 30  # 1.10.0 is newer than 1.0.0
    assert size("made_dataset/en-gl:1.0.0") == 2
    assert size("made_dataset/en-gl", "train[:10]") == 10


def test_one_split_is_split_by_hash(data_dir: Path) -> None:
    for name, code in (("en-gl", "gl"), ("many", "pt_br")):
        source = Tfds([f"made_dataset/{name}"], data_dir, dev_every=4, test_every=4)
        parts = [list(source.pairs(code, split)) for split in ("train", "dev", "test")]
        assert all(parts)
        assert sorted(one.first for part in parts for one in part) == sorted(p["en"] for p in PAIRS)


def test_identity_needs_no_tensorflow(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)  # importing it fails
    newest = Tfds(["made_dataset/en-gl"], data_dir).identity()
    assert list(newest["datasets"]) == ["made_dataset/en-gl:1.10.0"]
    assert newest == Tfds(["made_dataset/en-gl:1.10.0"], data_dir).identity()
    assert newest != Tfds(["made_dataset/en-gl:1.0.0"], data_dir).identity()
    with pytest.raises(ImportError):
        Tfds(["made_dataset/en-gl"], data_dir).language_pairs()


MISTAKES: list[tuple[dict, str]] = [
    ({"datasets": ["wmt16/ro-en"]}, r"wmt16/ro-en: no prepared dataset, nothing is there; `tf"),
    ({"datasets": ["made_dataset"]}, r"dataset, de-gl, en-gl, many, more, talks is there"),
    ({"datasets": ["made_dataset/en-gl:9.0.0"]}, r"no prepared dataset of version 9\.0\.0"),
    ({"datasets": ["made_dataset/en-gl"], "splits": {"dev": "x"}}, r"must be of train \(needed"),
    ({"datasets": ["made_dataset/en-gl"]}, r"no split 'test'; it has train, validation \(Tfds"),
    ({"datasets": ["made_dataset/de-gl"], "splits": {"train": "train"}}, r"has de, gl, no 'en'"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_mistakes_are_one_clear_line(data_dir: Path, arguments: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Tfds(data_dir=data_dir, **arguments).language_pairs()


@pytest.mark.parametrize("key", ["pythonClassName", "python_class_name", "type"])
def test_a_datasets_files_import_no_module(
    key: str, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow Datasets imports what features.json names; a saved config may name such a one."""
    (tmp_path / "strangers.py").write_text("raise SystemExit('its code runs')\n")
    monkeypatch.syspath_prepend(tmp_path)
    copy = shutil.copytree(data_dir, tmp_path / "tfds")
    path = copy / "made_dataset" / "en-gl" / "1.10.0" / "features.json"
    features = json.loads(path.read_bytes())
    features["more"] = {"features": [{key: "strangers.Feature"}]}
    path.write_text(json.dumps(features))
    with pytest.raises(InputError, match=r"code of another package \(strangers\.Feature\)"):
        Tfds(["made_dataset/en-gl"], copy).language_pairs()
