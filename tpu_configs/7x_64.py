"""64 chips of TPU7x (Ironwood) on GKE: 16 pods of 4 chips.

Replace image and bucket with yours.
"""

from jaxscale.launch import Cluster, JobSet

cluster = Cluster(
    platform="tpu 7x:4x4x4",
    scheduler=JobSet(image="us-docker.pkg.dev/my-project/images/jaxscale:latest"),
    shared="gs://my-bucket",
)
