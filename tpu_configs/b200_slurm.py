"""32 B200 GPUs of a Slurm cluster: 4 nodes of 8.

Replace partition, account and shared folder with yours.
"""

from jaxscale.launch import Cluster, Slurm

cluster = Cluster(
    platform="gpu b200 x 32",
    scheduler=Slurm(partition="b200", time="24:00:00"),
    shared="/shared",
    python="/shared/jaxscale/.venv/bin/python",
)
