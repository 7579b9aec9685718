"""The local server: OpenAI's, Anthropic's and Ollama's dialects over one engine.

A dialect's file says which fields its requests have (pydantic), what they come to (`asking.Ask`) and how an answer
looks there. `app.py` puts endpoints together; `guard.py` decides who is let in; `listening.py` owns the sockets.
"""
