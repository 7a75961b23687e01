"""gke.sh: node pools, the job set, XPK."""

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.documents.commands import write_program
from tests.scripts.cloud import ROOT, TRAIN, call, described, dry, remote, slice_options

# A chip, hosts of 4 and of 8 chips, several hosts.
POOLS = ["v4-8", "v4-128", "v5e-1", "v5e-8", "v5e-256", "v5p-128", "v6e-4", "v6e-16", "tpu7x-8"]


def options_of(words: list[str]) -> dict[str, str]:
    return dict(word[2:].split("=", 1) for word in words if "=" in word)


@pytest.mark.parametrize("slice_name", POOLS)
def test_a_pool_is_one_slice(slice_name: str) -> None:
    (pool,) = dry("gke.sh", "pool", *slice_options(slice_name), "--cluster=c")
    options, said = options_of(pool), described()[slice_name]
    assert options["num-nodes"] == said["HOSTS"]
    assert options["machine-type"] == said["MACHINE"]
    assert (options["location"], options["node-locations"]) == ("us-central2", "us-central2-b")
    # GKE takes no topology where it is the machine's own.
    assert options.get("tpu-topology", "") == (said["TOPOLOGY"] if said["HOSTS"] != "1" else "")
    # With GKE's default scopes the bucket can only be read.
    assert options["scopes"] == "storage-full,gke-default,cloud-platform"


def test_tpu7x_of_several_hosts_has_a_workload_policy() -> None:
    policy, *pools = dry(
        *["gke.sh", "pool", *slice_options("tpu7x-128"), "--cluster=c", "--slices=2"],
        "--gcloud=--disk-size=300",
    )
    assert policy[:5] == ["gcloud", "compute", "resource-policies", "create", "workload-policy"]
    assert {"--accelerator-topology=4x4x4", "--region=us-central2"} <= set(policy)
    assert [pool[4] for pool in pools] == ["big-0", "big-1"]
    for pool in pools:
        assert f"--placement-policy={policy[5]}" in pool
        assert "tpu-topology" not in options_of(pool)
        assert pool[-1] == "--disk-size=300"


@pytest.mark.parametrize(
    ("option", "flags", "selector"),
    [
        ("--spot", {"--spot"}, {"cloud.google.com/gke-spot": "true"}),
        (
            "--reservation=ours",
            {"--reservation-affinity=specific", "--reservation=ours"},
            {"cloud.google.com/reservation-name": "ours"},
        ),
        (
            "--flex_start",
            {"--flex-start", "--num-nodes=0", "--max-nodes=4", "--reservation-affinity=none"},
            {"cloud.google.com/gke-flex-start": "true"},
        ),
    ],
)
def test_pool_and_pods_are_of_one_kind(
    option: str, flags: set[str], selector: dict[str, str]
) -> None:
    (pool,) = dry("gke.sh", "pool", *slice_options("v5e-16"), "--cluster=c", option)
    assert flags <= set(pool)
    found = pod_of(manifest("--slice=v5e-16", option, *TRAIN))["nodeSelector"]
    plain = pod_of(manifest("--slice=v5e-16", *TRAIN))["nodeSelector"]
    assert found == plain | selector


def manifest(*arguments: str) -> dict:
    said = call("gke.sh", "manifest", "--name=big", "--image=here/m4:1", *arguments)
    assert said.returncode == 0, said.stderr
    return yaml.safe_load(said.stdout)


def pod_of(job_set: dict) -> dict:
    return job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_pods_have_workload_identity_unless_they_use_the_hosts_network() -> None:
    pod = pod_of(manifest("--slice=v5e-16", "--service_account=trainer", *TRAIN))
    assert pod["serviceAccountName"] == "trainer"
    assert not {"hostNetwork", "dnsPolicy"} & set(pod)
    pod = pod_of(manifest("--slice=v5e-16", "--host_network", *TRAIN))
    assert pod["hostNetwork"] is True
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"


def test_several_slices_are_several_jobs_of_a_job_set() -> None:
    job_set = manifest("--slice=v5e-256", "--slices=3", *TRAIN)
    (replicated,) = job_set["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 3
    assert replicated["template"]["spec"]["completions"] == 64
    annotation = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert job_set["metadata"]["annotations"][annotation] == "cloud.google.com/gke-nodepool"
    (words,) = dry("gke.sh", "logs", "--name=big", "--slice_index=2", "--worker=5")
    assert "job-index=2," in words[-1]
    assert words[-1].endswith("job-completion-index=5")


def test_environment_reaches_the_pods() -> None:
    flags = '--a=$(x) "b"'
    options = ("--env=XLA_FLAGS=" + flags, "--env=EMPTY=")
    (container,) = pod_of(manifest("--slice=v5e-16", *options, *TRAIN))["containers"]
    assert container["env"] == [
        {"name": "XLA_FLAGS", "value": flags.replace("$(", "$$(")},
        {"name": "EMPTY", "value": ""},
    ]
    xpk = (*slice_options("v5e-16"), "--cluster=c", "--image=i", *options, *TRAIN)
    (words,) = dry("gke.sh", "xpk", *xpk)
    assert set(options) <= set(words)


def test_a_pod_without_progress_is_ended() -> None:
    (container,) = pod_of(manifest("--slice=v5e-16", "--stall_minutes=7", *TRAIN))["containers"]
    command = container["livenessProbe"]["exec"]["command"]
    # The image has the scripts where the probe looks for them.
    assert command == ["bash", "/m4/scripts/tpu_host.sh", "alive", "7"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["bash", "/m4/scripts/tpu_host.sh", "run"]' in dockerfile
    (container,) = pod_of(manifest("--slice=v5e-16", "--stall_minutes=0", *TRAIN))["containers"]
    assert "livenessProbe" not in container


def test_the_job_set_runs_m4_on_every_host_of_one_slice() -> None:
    command = ["--", "eval", *TRAIN[2:]]
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
    pod = pod_of(job_set)
    expected = [text.replace("$(", "$$(") for text in awkward]  # Kubernetes makes $( of it
    assert pod["containers"][0]["args"] == ["train", *expected]
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    options = ("--name=a", "--image=i", "--slice=v5e-16", "--", "train", "\n")
    said = call("gke.sh", "manifest", *options)
    assert said.returncode == 2
    assert not said.stdout
    assert "control character" in said.stderr


def test_apply_gives_the_cluster_the_manifest(tmp_path: Path, fakes: Path) -> None:
    write_program(fakes / "kubectl", f'cat >"{tmp_path}/applied"; echo "$@"')
    options = ("--name=big", "--image=here/m4:1", "--slice=v5e-64", "--spot", "--slices=2")
    options += ("--env=A=b c", "--reservation=", "--stall_minutes=9", *TRAIN)
    assert call("gke.sh", "apply", *options).stdout.split() == ["apply", "--filename=-"]
    applied = (tmp_path / "applied").read_text()
    assert applied == call("gke.sh", "manifest", *options).stdout
    (tmp_path / "applied").unlink()
    subprocess.run(
        ["bash", "-c", call("gke.sh", "apply", "--dry_run", *options).stdout], check=True
    )
    assert (tmp_path / "applied").read_text() == applied


def test_xpk_runs_the_same_job() -> None:
    options = (*slice_options("v5e-256"), "--slices=2", "--cluster=c", "--image=here/m4:1")
    (words,) = dry("gke.sh", "xpk", *options, "--", "eval", "a b")
    assert words[:4] == ["xpk", "workload", "create", "--workload=big"]
    assert {"--tpu-type=v5litepod-256", "--num-slices=2", "--cluster=c"} <= set(words)
    assert shlex.split(remote(words)) == ["bash", "/m4/scripts/tpu_host.sh", "run", "eval", "a b"]
