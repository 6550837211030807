"""A whole pod of TPU v5e as a queued resource of Cloud TPU: 64 machines of 4 chips.

Replace project and bucket with yours.
"""

from jaxscale.launch import Cluster, QueuedResource

cluster = Cluster(
    platform="tpu v5e:16x16",
    scheduler=QueuedResource(
        project="my-project",
        zone="us-west4-a",
        runtime="v2-alpha-tpuv5-lite",
    ),
    shared="gs://my-bucket",
    python="/opt/jaxscale/bin/python",
    setup=(
        "test -x /opt/jaxscale/bin/python || python3 -m venv /opt/jaxscale",
        "/opt/jaxscale/bin/pip install -q 'jaxscale[tpu,remote]'",
        "gsutil -q -m rsync -r gs://my-bucket/code /opt/code && cd /opt/code",
    ),
)
