"""OpenAI's dialect: one endpoint a file."""

from localllm.server.openai import chat, completions, embeddings, models, responses

ENDPOINTS = (
    *chat.ENDPOINTS,
    *completions.ENDPOINTS,
    *responses.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *models.ENDPOINTS,
)
