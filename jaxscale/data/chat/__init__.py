"""Chats: rows of messages, rendered by the chat template of a model folder in a process of its own.

`chats.py` is the data, `chat_rows.py` its rows and masks, `chat_template.py` the template of a folder, and
`template_child.py` the process that runs a stranger's template.
"""
