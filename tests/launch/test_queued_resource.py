"""Queued resources of Cloud TPU: what the typed client sends, and the script that a machine starts with."""

import dataclasses
import runpy
import subprocess
import warnings
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

import jaxscale
from jaxscale.errors import UserError
from jaxscale.launch import Cluster, QueuedResource
from jaxscale.launch.cluster import read_cluster
from jaxscale.launch.queued_resource import request, submit_request
from tests.launch.command_words import COMMAND

CONFIGS = sorted((Path(jaxscale.__file__).parents[1] / "tpu_configs").glob("*.py"))
TPU = QueuedResource("p", "z", "r")


def test_a_queued_resource_passes_through_the_typed_client():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of this package
        import grpc
        from google.cloud import tpu_v2alpha1
        from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcTransport
        from google.longrunning.operations_pb2 import Operation

        states = tpu_v2alpha1.QueuedResourceState.State
        received: list[Any] = []
        answer: dict[str, Any] = {"state": states.WAITING_FOR_RESOURCES}

        class Handler(grpc.GenericRpcHandler):
            """Answers for Cloud TPU."""

            def service(self, handler_call_details: Any) -> Any:
                """Return the function that answers a method."""
                method = handler_call_details.method.rsplit("/", 1)[1]

                def create(message: bytes, context: Any) -> bytes:
                    """Take note of a request."""
                    if answer.get("error"):
                        context.abort(*answer["error"])
                    received.append(tpu_v2alpha1.CreateQueuedResourceRequest.deserialize(message))
                    return Operation(name="operations/1").SerializeToString()

                def get(message: bytes, context: Any) -> bytes:
                    """Return the resource with a state."""
                    name = tpu_v2alpha1.GetQueuedResourceRequest.deserialize(message).name
                    resource = tpu_v2alpha1.QueuedResource(name=name, state={"state": answer["state"]})
                    return tpu_v2alpha1.QueuedResource.serialize(resource)

                return grpc.unary_unary_rpc_method_handler(
                    {"CreateQueuedResource": create, "GetQueuedResource": get}[method]
                )

        server = grpc.server(futures.ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers((Handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            channel = grpc.insecure_channel(f"127.0.0.1:{port}")
            client = tpu_v2alpha1.TpuClient(transport=TpuGrpcTransport(channel=channel))
            for name in ("WAITING_FOR_RESOURCES", "SUSPENDING", "ACTIVE"):
                answer["state"] = states[name]
                cluster = Cluster("tpu v6e:16x16 x 2", dataclasses.replace(TPU, spot=True), shared="gs://b")
                sentence = submit_request(cluster, COMMAND, "gs://b/runs/plays", None, client)
                assert sentence == f"projects/p/locations/z/queuedResources/plays is {name.lower().replace('_', ' ')}"
            node_spec = received[0].queued_resource.tpu.node_spec[0]
            assert node_spec.multi_node_params.node_count == 2
            assert node_spec.node.accelerator_type == "v6e-256"
            assert "jaxscale watch" in node_spec.node.metadata["startup-script"]
            answer["error"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "Quota exceeded")
            with pytest.raises(UserError, match="Cloud TPU refused the request: RESOURCE_EXHAUSTED: Quota exceeded"):
                submit_request(cluster, COMMAND, "gs://b/runs/plays", None, client)
            channel.close()
        finally:
            server.stop(None)


def test_a_startup_script_is_a_program_and_machines_need_a_bucket():
    cluster = Cluster("tpu v5e:4x4", dataclasses.replace(TPU, reservation="ours", network="n", service_account="s"))
    content = request(cluster, COMMAND, "gs://b/runs/x", None)
    script = content["queued_resource"]["tpu"]["node_spec"][0]["node"]["metadata"]["startup-script"]
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0
    assert content["queued_resource"]["reservation_name"] == "projects/p/locations/z/reservations/ours"
    with pytest.raises(UserError, match="which the machines do not share"):
        request(cluster, COMMAND, "runs/x", None)
    assert runpy.run_path(str(CONFIGS[0]))["cluster"] == read_cluster(str(CONFIGS[0]))
