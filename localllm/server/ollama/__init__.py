"""Ollama's dialect, as its own library and programs that look for it speak it."""

from localllm.server.ollama import embeddings, generation, models, presets

ENDPOINTS = (*generation.ENDPOINTS, *embeddings.ENDPOINTS, *models.ENDPOINTS, *presets.ENDPOINTS)
