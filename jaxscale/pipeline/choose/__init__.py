"""Choice of partition and schedule, by prices of blocks and devices."""
