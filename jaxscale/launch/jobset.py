"""JobSet: the manifest of a run on Kubernetes, one child job per TPU slice or group of GPU hosts.

Each pod reads its rank from its labels and runs a watchdog. JobSet restarts all pods after a failure. A pod that was
stopped by a signal or disrupted by its node does not count as a failure. Exit codes 2, 4, 5 and 6 fail the JobSet, if
its controller supports patterns of messages; otherwise, each of them is one of the restarts that are allowed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxscale.errors import DIVERGED, GAVE_UP, INTERRUPTED, MISTAKE, PREEMPTED, SKIPPED, UserError
from jaxscale.heartbeat import ATTEMPT_VARIABLE
from jaxscale.launch.cluster import Cluster, JobSet
from jaxscale.launch.documents import environment_variables, refuse_variables, shell_lines, watch_command
from jaxscale.records.storage import is_remote

TPU_ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "7x": "tpu7x",
}
"""Values of the node label cloud.google.com/gke-tpu-accelerator, by chip (GKE documentation, "About TPUs in GKE")."""
GPU_ACCELERATORS = {
    "a100-40": "nvidia-tesla-a100",
    "a100-80": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
    "h200": "nvidia-h200-141gb",
    "b200": "nvidia-b200",
    "l4": "nvidia-l4",
    "t4": "nvidia-tesla-t4",
}
"""Values of the node label cloud.google.com/gke-accelerator, by chip (GKE documentation, "About GPUs in GKE")."""
CONTAINER, REPLICATED_JOB, VOLUME = "jaxscale", "slice", "shared"
COORDINATOR_PORTS = (8471, 8080, 61440)
_LABEL = "metadata.labels['jobset.sigs.k8s.io/{}']"


def jobset_text(cluster: Cluster, command: Sequence[str], run_dir: str, watchdog_timeouts_text: str | None) -> str:
    """Return the manifest as YAML; `jobset` describes the arguments."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes a text of several lines as a block scalar (`|`)."""

    def write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        """Return the YAML node for a text."""
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, write_text)
    return yaml.dump(
        jobset(cluster, command, run_dir, watchdog_timeouts_text), Dumper=Dumper, sort_keys=False, width=120
    )


def jobset(
    cluster: Cluster, command: Sequence[str], run_dir: str, watchdog_timeouts_text: str | None
) -> dict[str, Any]:
    """Return the manifest of a run, as a dict.

    Args:
        cluster: a cluster whose scheduler is a `JobSet`.
        command: words of the train command, without the program.
        run_dir: directory of the run, either in a bucket or in the folder that all pods mount.
        watchdog_timeouts_text: text of the watchdogs' timeouts.

    Raises:
        UserError: the pods could not reach the run's directory, or GKE has no nodes with the chip.
    """
    scheduler = cluster.scheduler
    assert isinstance(scheduler, JobSet)
    platform = cluster.parsed
    if platform is None:
        raise UserError("Cluster.platform: got 'local', expected the platform of the nodes, such as 'tpu v5e:4x4'")
    refuse_variables(cluster, "put them into a Kubernetes secret, and name it in JobSet.secrets")
    _check_folder(cluster, scheduler, run_dir)
    host_count = cluster.host_count // platform.slices
    chip_count = cluster.chips_per_host
    name = Path(run_dir).name
    is_tpu = platform.chip.kind == "tpu"
    label_by_chip = TPU_ACCELERATORS if is_tpu else GPU_ACCELERATORS
    if platform.chip.name not in label_by_chip:
        raise UserError(f"GKE has no nodes with {platform.chip.name}: expected one of {', '.join(label_by_chip)}")
    node_labels = {f"cloud.google.com/gke-{'tpu-' if is_tpu else ''}accelerator": label_by_chip[platform.chip.name]}
    if platform.topology is not None:
        node_labels["cloud.google.com/gke-tpu-topology"] = "x".join(map(str, platform.topology))
    script = "\n".join([*shell_lines(cluster, run_dir), 'exec "$@"'])
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": scheduler.image,
        "command": ["bash", "-c", script, "bash", *watch_command(cluster, command, run_dir, watchdog_timeouts_text)],
        "env": _variable_entries(cluster, run_dir, name, host_count, platform.slices),
        "ports": [{"containerPort": port} for port in COORDINATOR_PORTS],
        "resources": {"limits": {"google.com/tpu" if is_tpu else "nvidia.com/gpu": chip_count}},
        "securityContext": {"privileged": is_tpu},
    }
    if scheduler.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in scheduler.secrets]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.grace,
        "nodeSelector": node_labels,
        "containers": [container],
    }
    if scheduler.service_account:
        pod["serviceAccountName"] = scheduler.service_account
    volumes = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "memory", "mountPath": "/dev/shm"}]
    if scheduler.claim:
        volumes.append({"name": VOLUME, "persistentVolumeClaim": {"claimName": scheduler.claim}})
        mounts.append({"name": VOLUME, "mountPath": cluster.shared})
    pod["volumes"], container["volumeMounts"] = volumes, mounts
    job = {
        "parallelism": host_count,
        "completions": host_count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": _pod_rules()},
        "template": {"spec": pod},
    }
    metadata: dict[str, Any] = {"name": name}
    if scheduler.namespace:
        metadata["namespace"] = scheduler.namespace
    if scheduler.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": scheduler.queue}
    if is_tpu:
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": _failure_policy(scheduler),
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": platform.slices, "template": {"spec": job}}],
        },
    }


def _check_folder(cluster: Cluster, scheduler: JobSet, run_dir: str) -> None:
    """Raise UserError if the pods of a run do not share its directory."""
    if is_remote(run_dir):
        return
    if not cluster.shared or not scheduler.claim:
        raise UserError(
            f"--out: got {run_dir!r}, which pods do not share: set Cluster.shared to a bucket (gs://...), or set it to "
            "a path and JobSet.claim to a volume claim that all pods can write to"
        )
    if not Path(run_dir).is_relative_to(cluster.shared):
        raise UserError(
            f"--out: got {run_dir!r}, expected a path in {cluster.shared!r}, where the pods mount the volume"
        )


def _variable_entries(
    cluster: Cluster, run_dir: str, name: str, host_count: int, slice_count: int
) -> list[dict[str, Any]]:
    """Return the `env` entries of a pod. Kubernetes fills in some of the values from the pod's labels."""
    value_by_variable = {
        **environment_variables(cluster, run_dir),
        "PODS_PER_JOB": str(host_count),
        "JOB_COUNT": str(slice_count),
        "JOBSET_SUBDOMAIN": name,
    }
    label_by_variable = {
        "JOBSET_NAME": "jobset-name",
        "REPLICATED_JOB_NAME": "replicatedjob-name",
        "JOB_INDEX": "job-index",
        ATTEMPT_VARIABLE: "restart-attempt",
    }
    if slice_count > 1:
        value_by_variable |= {
            "MEGASCALE_NUM_SLICES": str(slice_count),
            "MEGASCALE_COORDINATOR_ADDRESS": f"{name}-{REPLICATED_JOB}-0-0.{name}",
        }
        label_by_variable["MEGASCALE_SLICE_ID"] = "job-index"
    label_entries = [
        {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": _LABEL.format(label)}}}
        for variable, label in label_by_variable.items()
    ]
    return [*({"name": variable, "value": value} for variable, value in value_by_variable.items()), *label_entries]


def _pod_rules() -> list[dict[str, Any]]:
    """Return the rules for which a pod that ends fails its job. The job's message then names the pod's exit code."""
    exit_codes = [MISTAKE, DIVERGED, GAVE_UP, SKIPPED, PREEMPTED, INTERRUPTED]
    return [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": exit_codes}},
    ]


def _failure_policy(scheduler: JobSet) -> dict[str, Any]:
    """Return the rules for failed jobs: some failures end the JobSet, and other failures restart it.

    Every job that a pod rule fails has the same reason, PodFailurePolicy. So patterns of the job's message distinguish
    the failures. A controller without such patterns counts every restart, and also restarts after a user's mistake.
    """
    policy: dict[str, Any] = {"maxRestarts": scheduler.restarts}
    if scheduler.has_message_patterns:

        def code_patterns(*codes: int) -> list[str]:
            """Return a list with the pattern of a message about any of these exit codes."""
            return [f".*exit code ({'|'.join(map(str, codes))}) matching.*"]

        policy["rules"] = [
            {
                "name": "finalCode",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": code_patterns(MISTAKE, DIVERGED, GAVE_UP, SKIPPED),
            },
            {
                "name": "stopSignal",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [
                    *code_patterns(PREEMPTED, INTERRUPTED),
                    ".*condition DisruptionTarget matching.*",
                ],
            },
        ]
    return policy
