"""The OpenAI-compatible server.

`app` answers HTTP; `engine` holds the engine's process from outside; `runtime` is what runs in it. What a client can
get wrong is judged where HTTP is answered, so that nobody's mistake reaches the engine.
"""
