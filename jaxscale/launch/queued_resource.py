"""Queued resources of Cloud TPU: a request for machines. Each machine runs the train command when it starts."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxscale.errors import UserError
from jaxscale.launch.cluster import Cluster, QueuedResource
from jaxscale.launch.documents import refuse_variables, retry_command, shell_lines, watch_command
from jaxscale.records.storage import is_remote

CORE_COUNTED = ("v4", "v5p", "7x")
"""Chips whose accelerator types state the number of cores, two per chip, instead of the number of chips."""
TYPE_NAMES = {"v4": "v4", "v5e": "v5litepod", "v5p": "v5p", "v6e": "v6e", "7x": "tpu7x"}
"""Name of each chip in accelerator types (Cloud TPU documentation, "TPU versions"; the name of 7x is from xpk)."""


def accelerator_type(cluster: Cluster) -> str:
    """Return the accelerator type of a slice, as Cloud TPU names it.

    Example:
        >>> accelerator_type(Cluster("tpu v5p:4x4x4", QueuedResource("p", "z", "r")))
        'v5p-128'
    """
    scheduler, platform = cluster.scheduler, cluster.parsed
    assert isinstance(scheduler, QueuedResource)
    assert platform is not None
    if scheduler.accelerator:
        return scheduler.accelerator
    name = TYPE_NAMES[platform.chip.name]
    return f"{name}-{platform.chips * (2 if platform.chip.name in CORE_COUNTED else 1)}"


def startup_script(cluster: Cluster, command: Sequence[str], run_dir: str, timeouts: str | None) -> str:
    """Return the script that each machine runs when it starts. The machines restart the run by themselves."""
    words = [*retry_command(cluster, run_dir), *watch_command(cluster, command, run_dir, timeouts)]
    return (
        "\n".join(["#!/usr/bin/env bash", "set -u", *shell_lines(cluster, run_dir), f"exec {shlex.join(words)}"]) + "\n"
    )


def request(cluster: Cluster, command: Sequence[str], run_dir: str, timeouts: str | None) -> dict[str, Any]:
    """Return the request as a dict: parent (project and zone), name, and queued resource of Cloud TPU's API v2alpha1.

    Args:
        cluster: a cluster of Cloud TPU.
        command: words of the train command, without the program.
        run_dir: directory of the run, in a bucket.
        timeouts: text of the watchdogs' timeouts.

    Raises:
        UserError: the run is not in a bucket. The machines share a run only through a bucket.
    """
    scheduler, platform = cluster.scheduler, cluster.parsed
    assert isinstance(scheduler, QueuedResource)
    assert platform is not None
    if cluster.host_count > 1 and not is_remote(run_dir):
        raise UserError(
            f"--out: got {run_dir!r}, which the machines do not share: set Cluster.shared to a bucket (gs://...)"
        )
    refuse_variables(
        cluster, "read them on the machines, by a line of Cluster.setup such as export X=$(gcloud secrets ...)"
    )
    name = Path(run_dir).name
    parent = f"projects/{scheduler.project}/locations/{scheduler.zone}"
    node: dict[str, Any] = {
        "accelerator_type": accelerator_type(cluster),
        "runtime_version": scheduler.runtime,
        "metadata": {"startup-script": startup_script(cluster, command, run_dir, timeouts)},
    }
    if scheduler.network:
        node["network_config"] = {"network": scheduler.network, "enable_external_ips": True}
    if scheduler.service_account:
        node["service_account"] = {"email": scheduler.service_account}
    node_spec: dict[str, Any] = {"parent": parent, "node": node}
    if platform.slices > 1:
        node_spec["multi_node_params"] = {"node_count": platform.slices, "node_id_prefix": name}
    else:
        node_spec["node_id"] = name
    resource: dict[str, Any] = {"tpu": {"node_spec": [node_spec]}}
    if scheduler.spot:
        resource["spot"] = {}
    elif scheduler.reservation:
        resource["guaranteed"] = {"reserved": True}
        resource["reservation_name"] = f"{parent}/reservations/{scheduler.reservation}"
    return {"parent": parent, "queued_resource_id": name, "queued_resource": resource}


def request_text(cluster: Cluster, command: Sequence[str], run_dir: str, timeouts: str | None) -> str:
    """Return the request as JSON."""
    return json.dumps(request(cluster, command, run_dir, timeouts), indent=2) + "\n"


def submit_request(
    cluster: Cluster, command: Sequence[str], run_dir: str, timeouts: str | None, client: Any = None
) -> str:
    """Send the request, and return a sentence about the state of the queued resource.

    Args:
        cluster: a cluster of Cloud TPU.
        command: words of the train command, without the program.
        run_dir: directory of the run.
        timeouts: text of the watchdogs' timeouts.
        client: a `google.cloud.tpu_v2alpha1.TpuClient`; by default, a client with the user's credentials.

    Raises:
        UserError: the client is not installed, or Cloud TPU refuses the request.
    """
    request_json = request(cluster, command, run_dir, timeouts)
    try:
        from google.api_core.exceptions import GoogleAPICallError  # pyright: ignore[reportMissingImports]
        from google.cloud import tpu_v2alpha1  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]
    except ImportError:
        raise UserError(
            "the client of Cloud TPU is not installed: pip install 'jaxscale[launch-tpu]'; --dry-run prints the request"
        ) from None
    client = client or tpu_v2alpha1.TpuClient()
    try:
        client.create_queued_resource(request=request_json)
        resource = client.get_queued_resource(
            name=f"{request_json['parent']}/queuedResources/{request_json['queued_resource_id']}"
        )
    except GoogleAPICallError as error:
        status_name = "" if error.grpc_status_code is None else error.grpc_status_code.name
        raise UserError(f"Cloud TPU refused the request: {status_name}: {error.message}") from None
    return f"{resource.name} is {resource.state.state.name.lower().replace('_', ' ')}"
