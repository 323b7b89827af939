"""An OpenAI-compatible reverse proxy in front of SGLang servers with Leyline (DESIGN §10).

It names the session of a request, applies a policy to its messages, keeps sessions on their server and passes
the rest through: the plugin derives the edits from the prompts (DESIGN §5).
"""
