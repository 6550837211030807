"""The machine: rates of chips and links, the platform of this process, and the communication of compiled programs."""
