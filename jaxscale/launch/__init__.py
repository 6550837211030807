"""Launch: start a run on many machines, watch its processes, and restart them after a failure. Needs no JAX."""

from jaxscale.launch.cluster import Cluster, JobSet, Local, QueuedResource, Slurm, Ssh

__all__ = ["Cluster", "JobSet", "Local", "QueuedResource", "Slurm", "Ssh"]
