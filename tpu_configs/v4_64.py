"""64 chips of TPU v4 as a queued resource of Cloud TPU: 16 machines of 4 chips.

Replace project and bucket with yours.
"""

from jaxscale.launch import Cluster, QueuedResource

cluster = Cluster(
    platform="tpu v4:4x4x4",
    scheduler=QueuedResource(
        project="my-project",
        zone="us-central2-b",
        runtime="tpu-ubuntu2204-base",
    ),
    shared="gs://my-bucket",
    python="/opt/jaxscale/bin/python",
    setup=(
        "test -x /opt/jaxscale/bin/python || python3 -m venv /opt/jaxscale",
        "/opt/jaxscale/bin/pip install -q 'jaxscale[tpu,remote]'",
        "gsutil -q -m rsync -r gs://my-bucket/code /opt/code && cd /opt/code",
    ),
)
