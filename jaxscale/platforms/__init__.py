"""The machine: facts about chips and links, what this process runs on, what a compiled program sends."""
