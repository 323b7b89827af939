"""An agent that edits its own history, served three ways by the real stack; what `leyline demo` runs.

`scenario` writes the conversation, `dialect` turns it into tokens, `arms` sends it, `results` holds what
came back; `screen` and `picture` show it, `servers` and `curl` look after the stack.
"""
