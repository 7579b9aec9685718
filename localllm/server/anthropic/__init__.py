"""Anthropic's dialect."""

from localllm.server.anthropic import messages

ENDPOINTS = messages.ENDPOINTS
