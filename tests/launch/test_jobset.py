"""JobSets: valid by the schemas and types of Kubernetes, and the pods find their places."""

import re
import warnings
from typing import Any

import pytest
import yaml

from jaxscale.errors import UserError
from jaxscale.launch import Cluster, JobSet
from jaxscale.launch.jobset import jobset, jobset_text
from jaxscale.launch.submit import launch
from jaxscale.platforms.join import place_of
from tests.launch.command_words import COMMAND

POD = JobSet("image:1")

POD_CLUSTERS = [
    Cluster("tpu v5e:4x4", POD, shared="gs://b"),
    Cluster(
        "tpu v6e:16x16 x 2", JobSet("i", namespace="n", queue="q", service_account="s", secrets=("k",)), shared="gs://b"
    ),
    Cluster("gpu h100 x 32", JobSet("i", claim="disk", has_message_patterns=False), shared="/shared", interface="eth1"),
    Cluster("tpu 7x:4x4x4", POD, shared="gs://b"),
]


@pytest.mark.parametrize("cluster", POD_CLUSTERS, ids=lambda cluster: cluster.platform)
def test_a_jobset_is_valid_and_loses_no_key_in_its_types(cluster):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of these packages
        import kubernetes_validate
        from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

        run_dir = cluster.run_dir("plays")
        manifest = jobset(cluster, COMMAND, run_dir, None)
        assert yaml.safe_load(jobset_text(cluster, COMMAND, run_dir, None)) == manifest
        for replicated_job in manifest["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated_job["template"]}
            kubernetes_validate.validate(job, "1.31", strict=True)
            broken_job = {**job, "spec": {**job["spec"], "complitions": 4}}
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(broken_job, "1.31", strict=True)
        typed_manifest = JobsetV1alpha2JobSet.from_dict(manifest)
        assert typed_manifest is not None
        assert _lost_keys(manifest, typed_manifest.to_dict()) == []


def _lost_keys(given: Any, read: Any, path: str = "") -> list[str]:
    """Return the paths of what a typed reading dropped or changed."""
    if isinstance(given, dict):
        return [
            lost
            for key in given
            for lost in (_lost_keys(given[key], read[key], f"{path}/{key}") if key in read else [f"{path}/{key}"])
        ]
    if isinstance(given, list):
        if len(given) != len(read):
            return [path]
        return [
            lost
            for index, (one, other) in enumerate(zip(given, read, strict=True))
            for lost in _lost_keys(one, other, f"{path}[{index}]")
        ]
    return [] if given == read else [path]


def test_the_pods_of_a_jobset_find_their_places():
    manifest = jobset(POD_CLUSTERS[1], COMMAND, "gs://b/runs/plays", None)
    replicated_job = manifest["spec"]["replicatedJobs"][0]
    assert replicated_job["replicas"] == 2
    assert replicated_job["template"]["spec"]["parallelism"] == 64
    pod = replicated_job["template"]["spec"]["template"]["spec"]
    labels = {"jobset-name": "plays", "replicatedjob-name": "slice", "job-index": "1", "restart-attempt": "3"}
    variables = {"JOB_COMPLETION_INDEX": "5"}
    for entry in pod["containers"][0]["env"]:
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        variables[entry["name"]] = entry["value"] if path is None else labels[re.findall(r"/([a-z-]+)'", path)[0]]
    place = place_of(variables)
    assert place is not None
    assert (place.coordinator, place.processes, place.rank) == ("plays-slice-0-0.plays:61443", 128, 69)
    assert variables["MEGASCALE_SLICE_ID"] == "1"
    assert variables["MEGASCALE_NUM_SLICES"] == "2"
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "16x16"
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert "Role" not in str(manifest)


def test_rules_tell_exit_codes_apart_by_the_jobs_message():
    rules = jobset(POD_CLUSTERS[0], COMMAND, "gs://b/runs/x", None)["spec"]["failurePolicy"]["rules"]

    def action(message: str) -> str:
        """Return the action for a failed job with this message; the default restarts the set and counts it."""
        for rule in rules:
            if any(re.fullmatch(pattern, message) for pattern in rule["onJobFailureMessagePatterns"]):
                return rule["action"]
        return "RestartJobSet"

    text = "Container jaxscale for pod default/x-0 failed with exit code {} matching FailJob rule at index 1"
    expected = {
        2: "FailJobSet",
        4: "FailJobSet",
        5: "FailJobSet",
        6: "FailJobSet",
        75: "RestartJobSetAndIgnoreMaxRestarts",
        137: "RestartJobSet",
    }
    assert {code: action(text.format(code)) for code in expected} == expected
    disruption = "Pod default/x-0 has condition DisruptionTarget matching FailJob rule at index 0"
    assert action(disruption) == "RestartJobSetAndIgnoreMaxRestarts"
    assert "rules" not in jobset(POD_CLUSTERS[2], COMMAND, "/shared/runs/x", None)["spec"]["failurePolicy"]


@pytest.mark.parametrize(
    ("cluster", "run_dir", "message"),
    [
        (Cluster("tpu v5e:4x4", POD), "runs/x", "which pods do not share: set Cluster.shared to a bucket"),
        (Cluster("tpu v5e:4x4", JobSet("i", claim="d"), shared="/s"), "/t/x", "expected a path in '/s'"),
        (Cluster("gpu h100-pcie x 8", POD, hosts=1, shared="gs://b"), "gs://b/x", "GKE has no nodes with h100-pcie"),
        (Cluster("local", POD, shared="gs://b"), "gs://b/x", "expected the platform of the nodes"),
    ],
)
def test_pods_that_cannot_run_are_refused(cluster, run_dir, message):
    with pytest.raises(UserError, match=message):
        jobset(cluster, COMMAND, run_dir, None)


def test_a_runs_name_must_be_one_of_dns():
    cluster = Cluster("tpu v5e:4x4", POD, shared="gs://b")
    for name in ("My_Run", "x" * 64, "1st"):
        with pytest.raises(UserError, match=r"name of the run: got .* hyphens, first a letter; --name sets"):
            launch(cluster, COMMAND, f"gs://b/runs/{name}", None, is_dry_run=True)
