"""Words of a command that a shell, or a reader of JSON or YAML, would take for something else."""

COMMAND = ["train", "my file.py", "--name=$(rm -rf ~) `x` 'q' \"d\" $HOME", "--data.text=a\\b;c|d&e"]
