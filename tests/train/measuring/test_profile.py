"""Where the trace of a run is said to be."""

from pathlib import Path

import jax
import pytest

from m4.storage import remote
from m4.train.measuring.profile import StepProfile


def test_a_trace_is_named_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(jax.profiler, "start_trace", lambda _: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    in_a_store = remote.local(f"file://{tmp_path}/store/run")
    for folder, named in ((tmp_path / "run", "run"), (in_a_store, "store/run")):
        with StepProfile((2, 3), folder, start=0, end=4) as profile:
            profile.start()
            profile.stop()
        assert capsys.readouterr().out == f"profile: steps 2 to 3 in {tmp_path}/{named}/profile\n"
