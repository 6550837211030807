"""16 chips of TPU v5e on GKE: 4 pods of 4 chips.

Replace image and bucket with yours.
"""

from jaxscale.launch import Cluster, JobSet

cluster = Cluster(
    platform="tpu v5e:4x4",
    scheduler=JobSet(image="us-docker.pkg.dev/my-project/images/jaxscale:latest"),
    shared="gs://my-bucket",
)
