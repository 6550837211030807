import pytest

from jaxscale.errors import UserError
from jaxscale.launch.cluster import Cluster, JobSet, Local, QueuedResource, Slurm, Ssh


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Local(processes="4"), "processes: got '4', expected a whole number"),
        (lambda: Slurm(options=3), r"options: got 3, expected a list \(text, ...\)"),
        (lambda: Slurm(time=24), "time: got 24, expected text"),
        (lambda: JobSet(image="a", secrets=({},)), r"secrets\[0\]: got {} \(dict\), expected text"),
        (lambda: QueuedResource(project=1, zone="b", runtime="c"), "project: got 1, expected text"),
        (lambda: Ssh(hosts=(1, 2)), r"hosts\[0\]: got 1, expected text"),
        (lambda: Cluster("cpu x 2", hosts=()), r"hosts: got \(\) \(tuple\), expected a whole number, or none"),
        (lambda: Cluster("cpu x 2", scheduler="slurm"), "scheduler: got 'slurm', expected a Local, or a Slurm"),
    ],
)
def test_a_field_of_a_wrong_type_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
