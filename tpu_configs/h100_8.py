"""One machine with 8 H100 GPUs: one process that uses all of them, under a watchdog."""

from jaxscale.launch import Cluster, Local

cluster = Cluster(platform="gpu h100 x 8", scheduler=Local(processes=1))
