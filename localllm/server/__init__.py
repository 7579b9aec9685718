"""The local server: OpenAI's, Anthropic's and Ollama's dialects over one engine.

A dialect's file declares the fields of its requests (pydantic), turns them into a `GenerationRequest`, and writes the
answer. `app.py` puts endpoints together; `guard.py` decides who is let in; `http_server.py` owns the sockets.
"""
