"""The executors: a schedule as tables, and the passes of its stages inside one compiled program."""
