"""Ollama's dialect, as its own library and programs that look for it speak it."""

from localllm.server.ollama import embedding, generation, models, pulling

ENDPOINTS = (*generation.ENDPOINTS, *embedding.ENDPOINTS, *models.ENDPOINTS, *pulling.ENDPOINTS)
