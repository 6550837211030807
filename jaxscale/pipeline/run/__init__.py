"""The executors of schedules: tables of integers, and the passes of stages inside one compiled program."""
