"""Folders in a bucket, by Google's own clients over loopback (`tests.bucket`)."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.sources.tsv import Tsv
from m4.jobs import corpus
from m4.settings import InputError
from m4.storage import lease, remote, store
from m4.storage.checkpoints import Checkpoints, shapes
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import latest_step, whole_step
from m4.storage.store import ABSENT, Changed, open_store
from tests.bucket import ACCOUNT, BUCKET, Emulator
from tests.command_line import TINY, m4
from tests.data.corpus import Made

_number = itertools.count()


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(lease, "PERIOD_SECONDS", 0.3)


@pytest.fixture
def address(emulator: Emulator) -> str:
    return f"gs://{BUCKET}/runs/{next(_number)}"


def folder_of(address: str) -> str:
    return address.removeprefix(f"gs://{BUCKET}/")


def another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine{next(_number)}"))
    return remote.local(address)


def test_bucket_writes_only_over_the_version_that_is_known(address: str, tmp_path: Path) -> None:
    bucket = open_store(address)
    first = bucket.write("a/b", b"1", ABSENT)
    with pytest.raises(Changed):
        bucket.write("a/b", b"2", ABSENT)
    second = bucket.write("a/b", b"2", first)
    with pytest.raises(Changed):
        bucket.write("a/b", b"3", first)
    with pytest.raises(Changed):
        bucket.delete("a/b", first)
    assert bucket.read("a/b") == b"2"
    there = bucket.stat("a/b")
    assert there is not None
    assert (there.size, there.version) == (1, second)
    bucket.delete("a/b", second)
    assert bucket.read("a/b") is bucket.stat("a/b") is None
    bucket.delete("a/b")
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 4 * 9000)  # more than one request's 8 MiB
    bucket.write("c/large", large)
    bucket.download("c/large", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == large.read_bytes()
    bucket.write("d", b"")
    assert bucket.list().keys() == {"c/large", "d"}
    assert bucket.list(["c"]).keys() == {"d"}


def test_a_corpus_in_a_bucket_is_built_once_and_downloaded_in_part(
    address: str, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = CorpusSpec(source=Made({"gl": 40}), vocabulary_size=400)
    built = corpus.build_corpus(spec, address)
    there = emulator.names(folder_of(address))
    assert there >= {"manifest.json", "text/train.gl.tsv", "train.english.tokens.npy"}
    another_machine(monkeypatch, tmp_path, address)
    assert corpus.build_corpus(spec, address).fingerprint == built.fingerprint
    folder = corpus.fetched(address, corpus.arrays)
    assert {path.name for path in folder.glob("train.*")} == {n for n in there if n[:6] == "train."}
    assert not (folder / "text").exists()
    # Half of a corpus is none: its manifest comes last. This machine builds it again.
    open_store(address).delete("manifest.json")
    with pytest.raises(ValueError, match="not a cache"):
        Cache(corpus.fetched(address, corpus.arrays))
    assert corpus.build_corpus(spec, address).fingerprint == built.fingerprint
    assert emulator.names(folder_of(address)) == there
    # The text's own folder is not taken for one.
    open_store(f"{address}/text").write("gl.train.tsv", b"a\tb\n")
    with pytest.raises(ValueError, match="neither a cache nor empty"):
        corpus.build_corpus(spec, f"{address}/text")
    assert "text/gl.train.tsv" in emulator.names(folder_of(address))


def test_another_machine_gets_what_a_job_left(
    address: str, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = remote.local(address)
    with remote.locked(here):
        (here / "decodes").mkdir()
        (here / "decodes" / "a.jsonl").write_text("one\n", encoding="utf-8")
        (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        remote.push(here / "checkpoints")
        (here / "decodes" / "a.jsonl").unlink()
        other = another_machine(monkeypatch, tmp_path, address)
        with pytest.raises(lease.Busy, match=f"MODEL_DIR = {address}: another m4 job is at work"):
            remote.locked(other, wait=False).__enter__()
    assert emulator.names(folder_of(address)) == {"metrics.jsonl"}
    remote.fetch(other)
    assert (other / "metrics.jsonl").read_text(encoding="utf-8") == "1\n"
    with remote.locked(other):
        (other / "metrics.jsonl").unlink()
    assert emulator.names(folder_of(address)) == set()


def test_503s_and_cut_connections_are_retried(address: str, emulator: Emulator) -> None:
    here = remote.local(address)
    with remote.locked(here):
        emulator.fail(r"POST /upload.*metrics\.jsonl", 1)
        emulator.fail("POST /upload.*/note", 1, cut=True)
        for name in ("metrics.jsonl", "note"):
            (here / name).write_text("1\n", encoding="utf-8")
        remote.push(here)
        assert len(emulator.failed) == 2
    assert emulator.names(folder_of(address)) == {"metrics.jsonl", "note"}
    assert emulator.read(f"{folder_of(address)}/note") == b"1\n"


@pytest.mark.parametrize(
    ("lacking", "role"),
    [
        ("storage.buckets.get", "roles/storage.legacyBucketReader"),
        ("storage.objects.list", "roles/storage.objectAdmin"),
        ("storage.objects.create", "roles/storage.objectAdmin"),
        ("storage.objects.get", "roles/storage.objectAdmin"),
        ("storage.objects.delete", "roles/storage.objectAdmin"),
    ],
)
def test_wrong_role_is_one_line_before_anything_starts(
    address: str, emulator: Emulator, lacking: str, role: str
) -> None:
    emulator.rights.remove(lacking)
    result = m4("train", f"--gin_file={TINY}", f"--model_dir={address}")
    assert result.mistake == (
        f"m4 train: {address}: {ACCOUNT} lacks {lacking}: grant it {role} on gs://{BUCKET} "
        "(gcloud storage buckets add-iam-policy-binding)"
    )
    assert emulator.names(folder_of(address)) <= {".running/train.json"}


def test_text_in_a_bucket_needs_a_reader_and_its_lack_is_one_line(
    address: str, emulator: Emulator
) -> None:
    source = Tsv(f"{address}/text")
    open_store(f"{address}/text").write("gl.train.tsv", b"a\tb\n")
    assert list(source.pairs("gl", "train")) == [("a", "b")]
    for lacking in ("storage.objects.list", "storage.objects.get"):
        emulator.rights.remove(lacking)
        with pytest.raises(InputError) as error:
            Tsv(f"{address}/text").languages()
        assert str(error.value) == (
            f"{address}/text: {ACCOUNT} lacks {lacking}: grant it roles/storage.objectViewer on "
            f"gs://{BUCKET} (gcloud storage buckets add-iam-policy-binding)"
        )
        emulator.reset()
    for missing, said in (
        ("gs://missing/text", "gs://missing/text: no bucket missing"),
        (f"{address}/other", rf"Tsv.folder = '{address}/other': must be a folder that exists"),
    ):
        with pytest.raises(InputError, match=said):
            Tsv(missing).languages()


def test_messages_name_the_address_and_not_the_working_copy(
    address: str, emulator: Emulator
) -> None:
    result = m4("watch", f"--model_dir={address}")
    assert result.mistake == f"m4 watch: {address}: not a run's folder (no run.json); train first"
    result = m4("decode", f"--gin_file={TINY}", f"--model_dir={address}")
    assert result.mistake.startswith(f"m4 decode: {address}: no checkpoints; train first")
    open_store(address).delete("run.json")
    emulator.write(f"{folder_of(address)}/cat.jpg", b"")
    result = m4("train", f"--gin_file={TINY}", f"--model_dir={address}")
    assert f"MODEL_DIR = {address}: not empty and not a run's folder" in result.mistake


def test_bucket_that_is_not_there_is_one_line(emulator: Emulator) -> None:
    result = m4("train", f"--gin_file={TINY}", "--model_dir=gs://missing/run")
    assert result.mistake.startswith("m4 train: gs://missing/run: no bucket missing")
    assert "make the bucket (gcloud storage buckets create gs://missing" in result.mistake


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("gs:/bucket/run", "an address begins with gs://"),
        ("gs:bucket", "an address begins with gs://"),
        ("gs://", "no bucket is named; gs://BUCKET/FOLDER"),
        ("gs:///run", "no bucket is named; gs://BUCKET/FOLDER"),
    ],
)
def test_address_that_is_none_is_one_line(wrong: str, said: str) -> None:
    result = m4("train", f"--gin_file={TINY}", f"--model_dir={wrong}")
    assert result.mistake == f"m4 train: {wrong}: {said}"


def test_other_stores_and_missing_packages_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = m4("train", f"--gin_file={TINY}", "--model_dir=s3://bucket/run")
    assert "s3:// is not supported" in result.mistake
    monkeypatch.setitem(__import__("sys").modules, "google.cloud.storage", None)
    monkeypatch.delattr("google.cloud.storage", raising=False)
    result = m4("train", f"--gin_file={TINY}", f"--model_dir=gs://{BUCKET}/run")
    assert result.mistake.endswith("gs:// needs pip install 'm4[gcs]'")


def test_network_that_is_down_is_one_line_and_no_mistake(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr(store, "_retry", lambda seconds: None)
    result = m4("train", f"--gin_file={TINY}", f"--model_dir={address}")
    assert result.status == 1
    assert f"{address}: cannot be reached" in result.err
    assert "Traceback" not in result.err


def steps_compiled(emulator: Emulator, address: str) -> set[str]:
    """The programs of training steps in the bucket."""
    names = emulator.names(f"{folder_of(address)}/compilation_cache/train")
    return {name for name in names if name.startswith("jit_train_step-") and name[-6:] == "-cache"}


def checkpoints(emulator: Emulator, address: str) -> set[int]:
    """The complete steps in the bucket."""
    names = emulator.names(f"{folder_of(address)}/checkpoints")
    parts = [name.split("/") for name in names if name.endswith("/commit_success.txt")]
    return {int(step) for step, *_ in parts if step.isdecimal()}


def test_checkpoints_in_a_bucket(address: str, emulator: Emulator) -> None:
    """By orbax, which asks Google's client of each bucket; tensorstore meets a 503."""
    here = remote.local(address)
    tree = {"a": jnp.arange(1000.0)}
    emulator.fail("POST /upload.*ocdbt", 1)
    with (
        remote.locked(here),
        contextlib.closing(Checkpoints(here / "checkpoints", keep=2)) as saved,
    ):
        for step in (1, 2, 3):
            saved.save(step, {"params": {"a": tree["a"] + step}}, {"step": step})
    assert emulator.failed
    assert checkpoints(emulator, address) == {2, 3}
    with contextlib.closing(Checkpoints(here / "checkpoints", read_only=True)) as there:
        assert latest_step(here / "checkpoints") == there.latest == 3
        assert there.note(3) == {"step": 3}
        found = there.restore(3, {"params": shapes(tree)})
        np.testing.assert_array_equal(found["params"]["a"], tree["a"] + 3)


@pytest.mark.thorough
def test_a_damaged_checkpoint_in_a_bucket_is_named_and_moved_aside(
    address: str, emulator: Emulator, capfd: pytest.CaptureFixture[str]
) -> None:
    here, folder = remote.local(address), f"{folder_of(address)}/checkpoints"
    tree = {"a": jnp.arange(1000.0)}
    with remote.locked(here):
        with contextlib.closing(Checkpoints(here / "checkpoints")) as saved:
            for step in (1, 2):
                saved.save(step, {"params": tree}, {"step": step})
        name = next(n for n in emulator.names(f"{folder}/2") if n.startswith("params/ocdbt."))
        content = emulator.read(f"{folder}/2/{name}")
        emulator.write(f"{folder}/2/{name}", content[:-1] + bytes([content[-1] ^ 1]))
        assert whole_step(here / "checkpoints") == 1
        assert f"2: damaged ({name}: its content is not what was written)" in capfd.readouterr().err
        assert checkpoints(emulator, address) == {1, 2}
        with contextlib.closing(Checkpoints(here / "checkpoints")) as saved:
            assert saved.latest == 1
            saved.save(2, {"params": tree}, {"step": 2})
    assert checkpoints(emulator, address) == {1, 2}
    assert f"2.damaged/{name}" in emulator.names(folder)
    assert whole_step(here / "checkpoints") == 2


def test_checkpoints_of_another_machine_are_seen_at_every_look(
    address: str, emulator: Emulator
) -> None:
    here, folder = remote.local(address), folder_of(address)
    assert latest_step(here / "checkpoints") is None
    for step in (2, 4, 6):
        emulator.write(f"{folder}/checkpoints/{step}/commit_success.txt", b"")
        assert latest_step(here / "checkpoints") == step


@pytest.mark.slow
@pytest.mark.thorough
def test_run_in_a_bucket(
    address: str, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained on one machine, longer on another one, read on a third; 503s and cut connections."""
    emulator.fail("GET /storage.*checkpoints", 1)
    emulator.fail("POST /upload.*manifest", 1, cut=True)
    keep = "--gin.experiment.Training.keep_checkpoints=2"
    arguments = [f"--gin_file={TINY}", keep, "--gin.experiment.Training.checkpoint_period=1"]
    result = m4("train", *arguments, f"--model_dir={address}", "--gin.TRAIN_STEPS=3")
    assert result.status == 0, result.err
    assert "training pairs in 3 languages" in result.out
    assert len(emulator.failed) == 2
    assert checkpoints(emulator, address) == {2, 3}
    there = {name.split("/")[0] for name in emulator.names(folder_of(address))}
    assert {"checkpoints", "config.gin", "data", "metrics.jsonl", "run.json"} <= there
    assert ".running" not in there
    here = another_machine(monkeypatch, tmp_path, address)
    result = m4("train", f"--model_dir={address}", "--gin.TRAIN_STEPS=4")
    assert result.status == 0, result.err
    assert "training pairs" not in result.out, "the corpus is there"
    assert checkpoints(emulator, address) == {3, 4}
    assert not (here / "checkpoints").exists()
    steps = [row["step"] for row in read_metrics(here) if "loss" in row]
    assert steps == sorted(set(steps))
    assert steps[-1] == 4
    another_machine(monkeypatch, tmp_path, address)
    result = m4("translate", f"--model_dir={address}", "--to=en", "a")
    assert result.status == 0, result.err
    assert len(result.out.splitlines()) == 1
    result = m4("watch", address, "--once")
    assert result.status == 0, result.err
    assert result.out.startswith("step: 4 of ")
    assert "| job: ended " in result.out
    assert "| checkpoint: step 4" in result.out


@pytest.mark.slow
@pytest.mark.thorough
def test_killed_job_is_resumed_on_another_machine(
    address: str, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it trains, others may look at the corpus, and may not train. What it compiled is not
    compiled again."""
    code = (
        "import sys; from m4.storage import lease; lease.PERIOD_SECONDS = 0.5\n"
        "from m4.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    model = f"--model_dir={address}"
    steps = ["--gin.TRAIN_STEPS=100000", "--gin.experiment.Training.checkpoint_period=1"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "first")}
    del environment["JAX_COMPILATION_CACHE_DIR"]
    command = [sys.executable, "-c", code, "train", f"--gin_file={TINY}", model, *steps]
    log = tmp_path / "log"
    with log.open("w") as file:
        first = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        until = time.monotonic() + 300
        while len(checkpoints(emulator, address)) < 2:
            assert first.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < until
            time.sleep(0.2)
        monkeypatch.setattr(lease, "PERIOD_SECONDS", 5.0)
        another_machine(monkeypatch, tmp_path, address)
        result = m4("data", "preview", "--temperatures=", model)
        assert result.status == 0, result.err
        assert "data_preview.json" in emulator.names(folder_of(address))
        result = m4("train", f"--gin_file={TINY}", model)
        assert result.status == 1
        assert f"MODEL_DIR = {address}: another m4 job is at work there" in result.err
        # What it compiled, too.
        compiled = steps_compiled(emulator, address)
        assert compiled
    finally:
        first.kill()
        first.wait()
    assert "train.json" in emulator.names(f"{folder_of(address)}/.running")
    monkeypatch.setattr(lease, "PERIOD_SECONDS", 0.3)
    here = another_machine(monkeypatch, tmp_path, address)
    last = max(checkpoints(emulator, address))
    command = [sys.executable, "-c", code, "train", model, f"--gin.TRAIN_STEPS={last + 2}"]
    environment["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert steps_compiled(emulator, address) == compiled, "it compiled the step again"
    assert max(checkpoints(emulator, address)) == last + 2
    done = [row["step"] for row in read_metrics(here) if "loss" in row]
    assert done == sorted(set(done))
    assert done[-1] == last + 2
    assert not emulator.names(f"{folder_of(address)}/.running")
