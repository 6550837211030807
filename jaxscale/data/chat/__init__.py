"""Chats: rows of messages, rendered by the chat template of a model folder in a separate process.

`chats.py` defines the data, `chat_rows.py` its rows and masks, `chat_template.py` the template of a folder, and
`template_child.py` the program that renders the template in that process.
"""
