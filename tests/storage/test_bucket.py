"""Runs and corpora in a bucket, by the real clients over loopback (`tests.bucket`)."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.sources.tsv import Tsv
from m4.jobs import corpus
from m4.settings import InputError
from m4.storage import locks
from m4.storage.checkpoints import Checkpoints, shapes
from m4.storage.local_copy import copy_of, fetched, finished_folder, local_place
from m4.storage.metrics_log import read_metrics
from m4.storage.objects import Objects
from m4.storage.steps import latest_step, whole_step
from scripts import copy_log
from tests.bucket import ACCOUNT, Emulator
from tests.command_line import TINY, m4
from tests.data.corpus import Made
from tests.storage.conftest import Capture, Machine, Patch, folder_of
from tests.train.loop.job import COMMON, FOR_EVER, Job, started
from tests.train.loop.test_processes import LOST, assert_as_never_interrupted


def test_a_corpus_in_a_bucket_is_built_once_and_downloaded_in_part(
    address: str, emulator: Emulator, machine: Machine
) -> None:
    spec = CorpusSpec(source=Made({"gl": 40}), vocabulary_size=400)
    name = corpus.build_corpus(spec, address)
    there = emulator.names(f"{folder_of(address)}/{name}")
    assert there >= {"manifest.json", "text/train.gl.txt", "train.tokens.00000.npy"}
    machine()
    assert corpus.build_corpus(spec, address) == name
    here = local_place(address) / name
    assert not (here / "train.tokens.00000.npy").exists()
    folder = finished_folder(address, name, corpus.arrays)
    assert folder == here
    assert {path.name for path in here.glob("train.*")} == {n for n in there if n[:6] == "train."}
    assert not (here / "text").exists()
    # Half of a corpus is none: its manifest comes last. This machine builds it again.
    Objects(f"{address}/{name}").delete("manifest.json")
    assert finished_folder(address, name, corpus.arrays) is None
    corpus.build_corpus(spec, address)
    Cache(here).verify()
    assert emulator.names(f"{folder_of(address)}/{name}") == there
    # What was built and not uploaded to its end is uploaded.
    Objects(f"{address}/{name}").delete("manifest.json", "token_counts.npy")
    fails = functools.partial(spec.build, progress=lambda *_: pytest.fail("it is built again"))
    corpus.build_corpus(spec, address, fails)
    assert emulator.names(f"{folder_of(address)}/{name}") == there


@pytest.mark.parametrize("lacking", ["list", "create"])
def test_wrong_role_is_one_line_before_anything_starts(
    address: str, emulator: Emulator, lacking: str
) -> None:
    emulator.rights.remove(f"storage.objects.{lacking}")
    result = m4("train", f"--gin_file={TINY}", f"--model_dir={address}")
    said = f"{ACCOUNT} lacks storage.objects.{lacking}: grant it roles/storage.objectAdmin"
    assert f"m4 train: {address}: {said}" in result.mistake
    assert emulator.names(folder_of(address)) <= {".running/train.json"}


def test_text_in_a_bucket_needs_a_reader_and_its_lack_is_one_line(
    address: str, emulator: Emulator
) -> None:
    source = Tsv(f"{address}/text")
    Objects(f"{address}/text").put("gl.train.tsv", b"a\tb\n")
    assert list(source.pairs("en-gl", "train")) == [("a", "b")]
    for lacking in ("storage.objects.list", "storage.objects.get"):
        emulator.rights.remove(lacking)
        said = f"{address}/text: {ACCOUNT} lacks {lacking}: grant it roles/storage.objectViewer"
        with pytest.raises(InputError, match=re.escape(said)):
            Tsv(f"{address}/text").language_pairs()
        emulator.reset()
    for missing, said in (
        ("gs://missing/text", "gs://missing/text: no bucket missing"),
        (f"{address}/other", rf"Tsv.folder = '{address}/other': must be a folder that exists"),
    ):
        with pytest.raises(InputError, match=said):
            Tsv(missing).language_pairs()


def test_messages_name_the_address_and_not_the_copy(address: str, emulator: Emulator) -> None:
    result = m4("watch", f"--model_dir={address}")
    assert "not a run's folder (no run.json); train first" in result.mistake
    result = m4("decode", f"--gin_file={TINY}", f"--model_dir={address}")
    assert result.mistake.startswith(f"m4 decode: {address}: not a run's folder (no run.json)")
    Objects(address).delete("run.json")
    emulator.write(f"{folder_of(address)}/cat.jpg", b"")
    result = m4("train", f"--gin_file={TINY}", f"--model_dir={address}")
    assert f"MODEL_DIR = {address}: not empty and not a run's folder" in result.mistake


def test_network_that_is_down_is_one_line_and_no_mistake(address: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr("m4.storage.objects._RETRY_SECONDS", 0.1)
    result = m4("train", f"--gin_file={TINY}", f"--model_dir={address}")
    assert result.status == 1
    assert f"{address}: cannot be reached" in result.err
    assert "Traceback" not in result.err


def steps_compiled(emulator: Emulator, address: str) -> set[str]:
    """Returns the programs of training steps in the bucket."""
    names = emulator.names(f"{folder_of(address)}/compilation_cache/train")
    return {name for name in names if name.startswith("jit_train_step-") and name[-6:] == "-cache"}


def checkpoints(emulator: Emulator, address: str) -> set[int]:
    """Returns the complete steps in the bucket."""
    names = emulator.names(f"{folder_of(address)}/checkpoints")
    parts = [name.split("/") for name in names if name.endswith("/commit_success.txt")]
    return {int(step) for step, *_ in parts if step.isdecimal()}


def test_checkpoints_in_a_bucket(address: str, emulator: Emulator) -> None:
    """By orbax, which asks Google's client of each bucket; tensorstore meets a 503."""
    folder = copy_of(address)
    tree = {"a": jnp.arange(1000.0)}
    emulator.fail("POST /upload.*ocdbt", 1)
    with Checkpoints(folder / "checkpoints", keep=1) as saved:
        for step in (1, 2):
            saved.save(step, {"params": {"a": tree["a"] + step}}, {"step": step})
    assert emulator.failed
    assert checkpoints(emulator, address) == {2}
    with Checkpoints(folder / "checkpoints", read_only=True) as there:
        assert latest_step(folder / "checkpoints") == 2
        assert there.note(2) == {"step": 2}
        found = there.restore(2, {"params": shapes(tree)})
        np.testing.assert_array_equal(found["params"]["a"], tree["a"] + 2)


@pytest.mark.thorough
def test_a_damaged_checkpoint_in_a_bucket_is_named_and_moved_aside(
    address: str, emulator: Emulator, capfd: Capture
) -> None:
    here, folder = copy_of(address) / "checkpoints", f"{folder_of(address)}/checkpoints"
    tree = {"a": jnp.arange(1000.0)}
    with Checkpoints(here) as saved:
        for step in (1, 2):
            saved.save(step, {"params": tree}, {"step": step})
    name = next(n for n in emulator.names(f"{folder}/2") if n.startswith("params/ocdbt."))
    content = emulator.read(f"{folder}/2/{name}")
    emulator.write(f"{folder}/2/{name}", content[:-1] + bytes([content[-1] ^ 1]))
    assert whole_step(here) == 1
    assert f"2: damaged ({name}: its content is not what was written)" in capfd.readouterr().err
    assert checkpoints(emulator, address) == {1, 2}
    with Checkpoints(here) as saved:
        assert saved.latest == 1
        saved.save(2, {"params": tree}, {"step": 2})
    assert checkpoints(emulator, address) == {1, 2}
    assert f"2.damaged/{name}" in emulator.names(folder)
    assert whole_step(here) == 2


def test_checkpoints_of_another_machine_are_seen_at_every_look(
    address: str, emulator: Emulator
) -> None:
    here, folder = copy_of(address) / "checkpoints", folder_of(address)
    assert latest_step(here) is None
    for step in (2, 4, 6):
        emulator.write(f"{folder}/checkpoints/{step}/commit_success.txt", b"")
        assert latest_step(here) == step


@pytest.mark.slow
@pytest.mark.thorough
def test_run_in_a_bucket(address: str, emulator: Emulator, machine: Machine) -> None:
    """Trained on one machine, longer on another one, read on a third; 503s and cut connections."""
    emulator.fail("GET /storage.*checkpoints", 1)
    emulator.fail("PUT .*manifest", 1, cut=True)
    keep = "--gin.experiment.Training.keep_checkpoints=2"
    arguments = [f"--gin_file={TINY}", keep, "--gin.experiment.Training.checkpoint_period=1"]
    result = m4("train", *arguments, f"--model_dir={address}", "--gin.TRAIN_STEPS=3").ok()
    assert "training pairs in 3 pairs of languages" in result.out
    assert f"{address}; next: m4 eval --model_dir={address}" in result.out
    assert len(emulator.failed) == 2
    assert checkpoints(emulator, address) == {2, 3}
    there = {name.split("/")[0] for name in emulator.names(folder_of(address))}
    assert {"checkpoints", "config.gin", "data", "metrics.jsonl", "run.json"} <= there
    assert ".running" not in there
    machine()
    result = m4("train", f"--model_dir={address}", "--gin.TRAIN_STEPS=4").ok()
    assert "training pairs" not in result.out, "the corpus is there"
    assert checkpoints(emulator, address) == {3, 4}
    assert not (copy_of(address, "train") / "checkpoints").exists()
    steps = [row["step"] for row in read_metrics(fetched(address)) if "loss" in row]
    assert steps == sorted(set(steps))
    assert steps[-1] == 4
    result = m4("train", f"--model_dir={address}", "--gin.transformer.Transformer.heads=1")
    assert f"MODEL_DIR = {address} belongs to another config" in result.mistake
    machine()
    result = m4("translate", f"--model_dir={address}", "--to=en", "a").ok()
    assert len(result.out.splitlines()) == 1
    result = m4("watch", address, "--once").ok()
    assert result.out.startswith("step: 4 of ")
    assert "| job: ended " in result.out
    assert "| checkpoint: step 4" in result.out
    corpora = {name for name in emulator.names(folder_of(address)) if name.startswith("data/")}
    m4("train", f"--model_dir={address}", "--fresh", "--gin.TRAIN_STEPS=1").ok()
    assert checkpoints(emulator, address) == {1}
    assert corpora <= emulator.names(folder_of(address))


COMMAND = (
    "import sys; from m4.storage import locks; locks.PERIOD_SECONDS = 0.5\n"
    "from m4.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture
def training(address: str, emulator: Emulator, tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Starts a process that trains until it is killed, and waits for two checkpoints."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "first")}
    del environment["JAX_COMPILATION_CACHE_DIR"]
    arguments = [f"--gin_file={TINY}", f"--model_dir={address}", "--gin.TRAIN_STEPS=100000"]
    arguments += ["--gin.experiment.Training.checkpoint_period=1"]
    log = tmp_path / "log"
    with log.open("w") as file:
        command = [sys.executable, "-c", COMMAND, "train", *arguments]
        job = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        until = time.monotonic() + 300
        while len(checkpoints(emulator, address)) < 2:
            assert job.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < until
            time.sleep(0.2)
        yield job
    finally:
        job.kill()
        job.wait()


@pytest.mark.slow
@pytest.mark.thorough
def test_killed_job_is_resumed_on_another_machine(
    training: subprocess.Popen,
    address: str,
    emulator: Emulator,
    machine: Machine,
    monkeypatch: Patch,
) -> None:
    """While a run trains, others may look at the corpus, and may not train.

    Its compiled programs are not compiled again.
    """
    monkeypatch.setattr(locks, "PERIOD_SECONDS", 5.0)
    home = machine()
    m4("data", "preview", f"--model_dir={address}").ok()
    assert "data_preview.json" in emulator.names(folder_of(address))
    result = m4("train", f"--gin_file={TINY}", f"--model_dir={address}")
    assert result.status == 1
    assert f"MODEL_DIR = {address}: another m4 job is at work there" in result.err
    compiled = steps_compiled(emulator, address)
    assert compiled
    training.kill()
    training.wait()
    assert "train.json" in emulator.names(f"{folder_of(address)}/.running")
    last = max(checkpoints(emulator, address))
    end = f"--gin.TRAIN_STEPS={last + 2}"
    command = [sys.executable, "-c", COMMAND, "train", f"--model_dir={address}", end]
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    del environment["JAX_COMPILATION_CACHE_DIR"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "waiting to see whether it still runs" in done.stderr
    assert steps_compiled(emulator, address) == compiled, "it compiled the step again"
    assert max(checkpoints(emulator, address)) == last + 2
    rows = [row["step"] for row in read_metrics(fetched(address)) if "loss" in row]
    assert rows == sorted(set(rows))
    assert rows[-1] == last + 2
    assert not emulator.names(f"{folder_of(address)}/.running")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_job_whose_lock_is_taken_over_ends(
    training: subprocess.Popen, address: str, emulator: Emulator, tmp_path: Path
) -> None:
    mark = json.dumps({"job": "another", "host": "elsewhere", "pid": 7, "copy": "a copy"})
    emulator.write(f"{folder_of(address)}/.running/train.json", mark.encode())
    assert training.wait(60) == locks.LOST_STATUS
    last = (tmp_path / "log").read_text(encoding="utf-8").splitlines()[-1]
    assert "another job has taken it over (elsewhere, process 7); this one ends" in last
    assert emulator.read(f"{folder_of(address)}/.running/train.json") == mark.encode()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_pipeline_over_processes_with_a_folder_in_a_bucket(
    address: str, emulator: Emulator, tmp_path: Path, machine: Machine
) -> None:
    """A pipeline runs across two machines of four devices that share a bucket only.

    Both end, and another one resumes without a pipeline.
    """
    model = [
        "--gin.transformer.Transformer.moe=None",
        "--gin.transformer.Transformer.encoder_layers=2",
        "--gin.transformer.Transformer.decoder_layers=2",
        "--gin.transformer.Transformer.scan_layers=True",
        "--gin.transformer.Transformer.pipeline_microbatches=2",
        # A pipeline draws other numbers.
        "--gin.transformer.Transformer.dropout_rate=0.0",
    ]
    mesh = ["--gin.mesh.make_mesh.stage=2", "--gin.mesh.make_mesh.data=4"]
    homes = [tmp_path / "first", tmp_path / "second"]
    where = f"--model_dir={address}"
    job = Job(tmp_path / "two", 2, 4, where, FOR_EVER, *model, *mesh, homes=homes)
    with started(job):
        job.wait_for(lambda: max(checkpoints(emulator, address), default=0) >= 4, 300)
        job.processes[0].kill()
        first, second = job.statuses(60)
        assert first == -signal.SIGKILL
        assert second in LOST, job.said()
    stopped = max(checkpoints(emulator, address))
    step = f"{folder_of(address)}/checkpoints/{stopped}"
    note = json.loads(emulator.read(f"{step}/note/metadata"))
    assert note["pipeline"]["stages"] == 2
    # Each has written its parts of a checkpoint, and the second one has read the corpus there.
    parts = {name.split("/")[0] for name in emulator.names(f"{step}/params")}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= parts
    (corpus,) = (homes[1] / "m4").glob("data.*/corpora/*")
    assert (corpus / "shards.0" / "train.tokens.00000.npy").is_file()
    assert not (corpus / "text").exists(), "training reads no text"
    assert not list((homes[1] / "m4").glob("run.*/*/metrics.jsonl")), "only the first one writes"
    machine()
    end = f"--gin.TRAIN_STEPS={stopped + 1}"
    said = m4("train", *COMMON, *model, where, end)
    assert said.status == 0, said.err
    assert not emulator.names(f"{folder_of(address)}/.running")
    assert_as_never_interrupted(fetched(address), stopped + 1, tmp_path / "alone", *model)


# A job's log.


def test_a_growing_log_is_copied_until_its_process_has_ended(
    address: str, emulator: Emulator, tmp_path: Path
) -> None:
    log, target = tmp_path / "log", f"{address}/logs/host/train.log"
    log.write_bytes(b"one\n")
    job = subprocess.Popen(["sleep", "60"])
    thread = threading.Thread(target=copy_log.follow, args=(log, target, job.pid, 0.05))
    thread.start()
    try:
        for text in (b"one\n", b"one\ntwo\n"):
            log.write_bytes(text)
            end = time.monotonic() + 20
            while emulator.read(folder_of(target)) != text and time.monotonic() < end:
                time.sleep(0.01)
            assert emulator.read(folder_of(target)) == text
        log.write_bytes(b"Traceback\n")
    finally:
        job.kill()
        job.wait()
    thread.join(20)
    assert not thread.is_alive()
    assert emulator.read(folder_of(target)) == b"Traceback\n"


def test_a_log_that_cannot_be_copied_is_reported_once_and_retried(
    address: str, emulator: Emulator, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    job = subprocess.Popen(["true"])
    job.wait()
    assert not os.path.exists(f"/proc/{job.pid}")
    monkeypatch.setattr(copy_log, "_LONGEST_BYTES", 4)
    (tmp_path / "log").write_bytes(b"123456")
    emulator.rights.remove("storage.objects.create")
    copy_log.follow(tmp_path / "log", f"{address}/train.log", job.pid, 0.03)
    (line,) = capsys.readouterr().err.splitlines()
    assert "the log is not copied, will retry (" in line
    assert "lacks storage.objects.create: grant it roles/" in line
    emulator.reset()
    copy_log.follow(tmp_path / "log", f"{address}/train.log", job.pid, 0.03)
    assert emulator.read(folder_of(f"{address}/train.log")) == b"3456", "the end of it"
