"""Metrics for Prometheus: counts, times and sizes; no text, no key, no path of a user's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from localllm.engine.events import FinishedEvent

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = here = CollectorRegistry()
        self._requests = Counter("localllm_requests", "Requests.", ["path", "status"], registry=here)
        self._tokens = Counter("localllm_tokens", "Tokens, by what became of them.", ["kind"], registry=here)
        self._ttft = Histogram(
            "localllm_time_to_first_token_seconds",
            "From the engine's door to an answer's first token.",
            buckets=_SECONDS,
            registry=here,
        )
        self._ended = Counter("localllm_answers", "Answers, by why they ended.", ["reason"], registry=here)
        self._running = Gauge("localllm_answers_running", "Being computed now.", registry=here)
        self._waiting = Gauge("localllm_answers_waiting", "Waiting for their turn now.", registry=here)
        self._num_loaded = Gauge("localllm_models_loaded", "Models that are loaded.", registry=here)

    def count_request(self, path: str, status: int) -> None:
        """path: the endpoint's, not the request's."""
        self._requests.labels(path, str(status)).inc()

    def count_answer(self, finished: FinishedEvent) -> None:
        usage = finished.usage
        self._ended.labels(finished.finish_reason).inc()
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("prompt_cached").inc(usage.cached_tokens)
        self._tokens.labels("completion").inc(usage.completion_tokens)
        if finished.timings.ttft_s is not None:
            self._ttft.observe(finished.timings.ttft_s)
        if finished.speculation is not None:
            self._tokens.labels("drafted").inc(finished.speculation.drafted)
            self._tokens.labels("draft_accepted").inc(finished.speculation.accepted)

    def text(self, num_running: int, num_waiting: int, *, num_loaded: int) -> bytes:
        """Return Prometheus' format."""
        self._num_loaded.set(num_loaded)
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        return generate_latest(self.registry)
