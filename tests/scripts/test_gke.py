"""gke.sh: node pools, the job set, XPK."""

from __future__ import annotations

import math
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.scripts.cloud import TRAIN, call, dry, make_program, remote, slice_options

SLICES = [f"v4-{2**k}" for k in range(4, 12)] + [f"v5e-{2**k}" for k in range(4, 9)]


@pytest.mark.parametrize("slice_name", SLICES)
def test_hosts_and_topology_are_those_of_the_slice(slice_name: str) -> None:
    generation, number = slice_name.split("-")
    chips = int(number) // (2 if generation == "v4" else 1)  # v4 counts TensorCores
    pool = dry("gke.sh", "pool", *slice_options(slice_name), "--cluster=c")[0]
    options = dict(word[2:].split("=", 1) for word in pool if "=" in word)
    topology = [int(part) for part in options["tpu-topology"].split("x")]
    assert len(topology) == (3 if generation == "v4" else 2)  # a torus in three dimensions or two
    assert topology == sorted(topology)
    assert math.prod(topology) == chips == 4 * int(options["num-nodes"])
    assert options["machine-type"].endswith("-4t")  # four chips
    assert options["location"] == "us-central2"


def manifest(*arguments: str) -> dict:
    said = call("gke.sh", "manifest", "--name=big", "--image=here/m4:1", *arguments)
    assert said.returncode == 0, said.stderr
    return yaml.safe_load(said.stdout)


@pytest.mark.parametrize("job", ["train", "decode", "eval"])
def test_the_job_set_runs_m4_on_every_host_of_one_slice(job: str) -> None:
    command = ["--", job, *TRAIN[2:]]
    job_set = manifest("--slice=v4-128", "--max_restarts=7", "--service_account=trainer", *command)
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] == 7
    (replicated,) = job_set["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    hosts = replicated["template"]["spec"]
    # 4 x 4 x 4 chips, four a host; one pod that fails is the Job's end, so that all start again.
    assert hosts["parallelism"] == hosts["completions"] == 16
    assert hosts["backoffLimit"] == 0
    pod = hosts["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes asks for it where podFailurePolicy is
    assert pod["serviceAccountName"] == "trainer"
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    (container,) = pod["containers"]
    assert container["args"] == command[1:]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}


def test_user_mistake_is_not_retried() -> None:
    spec = manifest("--slice=v5e-256", *TRAIN)["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    (container,) = job["template"]["spec"]["containers"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2],
    }


def test_arguments_survive_yaml_and_kubernetes() -> None:
    awkward = ["it's", 'a "b"', "back\\slash", "# no comment", "ü", "yes", "1", "$(HOME)", ""]
    job_set = manifest("--slice=v5e-16", "--spot", "--", "train", *awkward)
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    expected = [text.replace("$(", "$$(") for text in awkward]  # Kubernetes makes $( of it
    assert pod["containers"][0]["args"] == ["train", *expected]
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    options = ("--name=a", "--image=i", "--slice=v5e-16", "--", "train", "\n")
    said = call("gke.sh", "manifest", *options)
    assert said.returncode == 2
    assert not said.stdout
    assert "control character" in said.stderr


def test_apply_gives_the_cluster_the_manifest(tmp_path: Path, fakes: Path) -> None:
    make_program(fakes / "kubectl", f'cat >"{tmp_path}/applied"; echo "$@"')
    options = ("--name=big", "--image=here/m4:1", "--slice=v5e-64", "--spot", *TRAIN)
    assert call("gke.sh", "apply", *options).stdout.split() == ["apply", "--filename=-"]
    applied = (tmp_path / "applied").read_text()
    assert applied == call("gke.sh", "manifest", *options).stdout
    (tmp_path / "applied").unlink()
    subprocess.run(
        ["bash", "-c", call("gke.sh", "apply", "--dry_run", *options).stdout], check=True
    )
    assert (tmp_path / "applied").read_text() == applied


@pytest.mark.parametrize("job", ["train", "decode", "eval"])
def test_xpk_runs_the_same_job(job: str) -> None:
    options = (*slice_options("v5e-256"), "--cluster=c", "--image=here/m4:1", "--", job, "a b")
    (words,) = dry("gke.sh", "xpk", *options)
    assert words[:4] == ["xpk", "workload", "create", "--workload=big"]
    assert {"--tpu-type=v5litepod-256", "--docker-image=here/m4:1", "--cluster=c"} <= set(words)
    assert shlex.split(remote(words)) == ["m4", job, "a b"]


@pytest.mark.parametrize("option", ["--spot", "--service_account=reader"])
def test_options_that_xpk_lacks_are_refused(option: str) -> None:
    said = call("gke.sh", "xpk", *slice_options(), option, "--cluster=c", "--image=m4:1", *TRAIN)
    assert said.returncode == 2
    assert "XPK's cluster decides them" in said.stderr
    assert not said.stdout
