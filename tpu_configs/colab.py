"""A Colab machine, with whatever it has: a CPU, a GPU or a TPU."""

from jaxscale.launch import Cluster, Local

cluster = Cluster(platform="local", scheduler=Local(processes=1))
