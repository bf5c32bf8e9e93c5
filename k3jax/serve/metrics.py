"""What a server counts, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from k3jax.serve.jobs import Jobs

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """Answers by endpoint and status, latencies, and what the scheduler knows itself."""

    def __init__(self, jobs: Jobs) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_SchedulerCollector(jobs))
        self.answers = Counter("k3jax_requests", "Requests answered.", ["endpoint", "status"], registry=self._registry)
        self.first_token = Histogram(
            "k3jax_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.per_token = Histogram(
            "k3jax_time_per_output_token_seconds",
            "Mean time between the tokens of a request.",
            buckets=TOKEN_SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """All of it now."""
        return generate_latest(self._registry)


class _SchedulerCollector(Collector):
    """Numbers that are kept anyway, read when they are asked for."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        jobs, scheduler = self._jobs, self._jobs.scheduler
        counters = {
            "k3jax_prompt_tokens": ("Tokens of prompts that have started.", scheduler.prompt_tokens),
            "k3jax_cached_tokens": ("Of these, tokens that were not read again.", scheduler.cached_tokens),
            "k3jax_generated_tokens": ("Tokens generated.", jobs.generated_tokens),
        }
        gauges = {
            "k3jax_sequences_running": ("Sequences with a slot.", scheduler.num_running),
            "k3jax_sequences_waiting": ("Sequences without one.", scheduler.num_waiting),
            "k3jax_slots": ("Sequences that can have a slot.", scheduler.num_slots),
            "k3jax_pages_free": ("Pages of latents that nobody holds.", scheduler.num_free_pages),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
