"""`m4 checkpoint`: what a run's checkpoints hold, and whether it is what was written."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from m4.storage import safetensors
from m4.storage.checkpoints import Checkpoints
from tests.command_line import m4

KERNEL = np.arange(12, dtype=np.float32).reshape(3, 4) / 7


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Saves two steps, with an infinite scale in the second one."""
    folder = tmp_path / "run"
    (folder / "vocabulary").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": {}}))
    (folder / "config.gin").write_text("# nothing\n")
    with Checkpoints(folder / "checkpoints") as store:
        for step in (2, 4):
            scale = jnp.asarray([3.0, 4.0 if step == 2 else jnp.inf])
            params = {"wi": {"kernel": jnp.asarray(KERNEL) * step}, "scale": scale}
            store.save(
                step, {"params": params, "optimizer": {"count": jnp.ones(())}}, {"step": step}
            )
    return folder


def test_it_needs_no_accelerator(run: Path) -> None:
    """Training may have it; here none is there, and libtpu would print why."""
    command = [sys.executable, "-m", "m4", "checkpoint", "verify", str(run)]
    environment = {**os.environ, "JAX_PLATFORMS": "tpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def damage(run: Path, step: int) -> Path:
    path = next((run / "checkpoints" / str(step) / "params").rglob("ocdbt.process_0/d/*"))
    path.write_bytes(path.read_bytes()[::-1])
    return path


def test_list_and_verify_show_every_step(run: Path) -> None:
    said = m4("checkpoint", "list", run).ok()
    rows = [line.split() for line in said.out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["2", "4"]
    assert all("optimizer, params" in " ".join(row) for row in rows)
    assert m4("checkpoint", "list", f"--model_dir={run}").out == said.out
    assert m4("checkpoint", "list").mistake.endswith("give a run folder: --model_dir=...")
    damaged = damage(run, 4)
    m4("checkpoint", "verify", run, "--step=2").ok()
    said = m4("checkpoint", "verify", run)
    assert said.status == 1
    assert "DAMAGED" in said.out
    assert damaged.name[:8] in said.out.replace("\n", "")
    missing = m4("checkpoint", "verify", run, "--step=3").mistake
    assert "no checkpoint of step 3; there are 2, 4" in missing
    assert "not a run's folder" in m4("checkpoint", "list", run.parent).mistake


def test_inspect_shows_arrays_norms_and_what_is_not_finite(run: Path) -> None:
    said = m4("checkpoint", "inspect", run, "--step=2").ok()
    (row,) = [line.split() for line in said.out.splitlines() if "wi/kernel" in line]
    assert row == ["wi/kernel", "3x4", "float32", "whole", f"{np.linalg.norm(KERNEL * 2):.4g}", "0"]
    said = m4("checkpoint", "inspect", run)
    assert said.status == 1  # the last step has an infinite scale
    (row,) = [line.split() for line in said.out.splitlines() if line.strip().startswith("scale")]
    assert row == ["scale", "2", "float32", "whole", "inf", "1"]
    damage(run, 4)
    said = m4("checkpoint", "inspect", run, "--step=4")
    assert "4: damaged (params/" in said.mistake


def test_convert_to_safetensors_and_back(run: Path, tmp_path: Path) -> None:
    file, back = tmp_path / "model.safetensors", tmp_path / "back"
    m4("checkpoint", "convert", run, "--step=2", "--dtype=bfloat16", f"--output={file}").ok()
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])  # as others read it
    header = json.loads(content[8 : 8 + length])
    assert header["wi.kernel"]["dtype"] == "BF16"
    assert header["wi.kernel"]["shape"] == [3, 4]
    start, stop = header["wi.kernel"]["data_offsets"]
    assert content[8 + length :][start:stop] == np.asarray(jnp.bfloat16(KERNEL * 2)).tobytes()
    assert len(content) == 8 + length + 2 * (12 + 2)
    m4(
        "checkpoint", "convert", run, f"--weights={file}", "--dtype=float32", f"--output={back}"
    ).ok()
    with Checkpoints(back / "checkpoints", read_only=True) as store:
        found = store.read(2, "params")  # the step that the file names
        assert store.note(2) == {"step": 4, "converted": "float32"}
    np.testing.assert_array_equal(
        found["wi/kernel"], np.asarray(jnp.bfloat16(KERNEL * 2), np.float32)
    )
    assert (back / "config.gin").is_file()
    m4("checkpoint", "verify", back).ok()
    assert "is there already" in m4("checkpoint", "convert", run, f"--output={back}").mistake


@pytest.mark.parametrize("content", [b"{}", struct.pack("<Q", 10**6)])
def test_what_is_no_safetensors_file_is_one_line(run: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    said = m4("checkpoint", "convert", run, f"--weights={file}", f"--output={tmp_path / 'new'}")
    assert "cannot be read as safetensors" in said.mistake
    safetensors.write(file, {"wi/kernel": KERNEL.T}, {})
    said = m4("checkpoint", "convert", run, f"--weights={file}", f"--output={tmp_path / 'new'}")
    assert "scale is missing there and (2,) in the run" in said.mistake


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (np.ones(2, np.int32), "scale has numbers of type int32: must be floats"),
        (np.asarray([1e30, -1e30], np.float32), "scale has 2 values that are not finite"),
    ],
)
def test_weights_are_finite_floats(run: Path, tmp_path: Path, scale: np.ndarray, said: str) -> None:
    """Read from a file, and as they are written: 1e30 is infinite as float16."""
    file = tmp_path / "model.safetensors"
    safetensors.write(file, {"wi/kernel": KERNEL, "scale": scale}, {})
    words = ("--dtype=float16", f"--output={tmp_path / 'new'}")
    assert said in m4("checkpoint", "convert", run, f"--weights={file}", *words).mistake
    assert not (tmp_path / "new").exists()
    said = m4("checkpoint", "convert", run, *words).mistake
    assert "scale has 1 values that are not finite" in said  # in step 4


@pytest.mark.parametrize("what", ["list", "verify", "inspect"])
def test_what_only_convert_takes_is_refused(run: Path, what: str) -> None:
    more = "--dtype=bfloat16"
    said = m4("checkpoint", what, run, more).mistake
    assert said == f"m4 checkpoint: {more}: only with convert, not {what}"
