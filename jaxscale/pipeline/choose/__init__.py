"""Choice of partition and schedule from the prices of blocks and the resources of devices."""
