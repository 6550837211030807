"""32 H100 GPUs on GKE: 4 pods of 8 GPUs.

Replace image and bucket with yours.
"""

from jaxscale.launch import Cluster, JobSet

cluster = Cluster(
    platform="gpu h100 x 32",
    scheduler=JobSet(image="us-docker.pkg.dev/my-project/images/jaxscale:latest"),
    shared="gs://my-bucket",
)
