"""The executors of schedules: one compiled program that follows a table of integers and runs the stages' passes."""
