"""A Prometheus endpoint for ``rollproof check --follow`` (extra ``metrics``).

prometheus_client writes the text format, negotiates OpenMetrics and serves both; written by hand,
its escapes and content types would be ours to keep right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rollproof.errors import ExtraError, UsageError
from rollproof.verification.followed import Snapshot

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["LOOPBACK", "MetricsPage", "serve_metrics"]

LOOPBACK = "127.0.0.1"
"""Where the endpoint listens: on this machine alone. It has no password."""


class MetricsPage(Protocol):
    """A page that is served; ``port`` is its port."""

    port: int

    def show(self, snapshot: Snapshot) -> None:
        """Serve these numbers from now on."""


class _Page:
    """The numbers of the last snapshot: a scrape, which has a thread of its own, sees one whole."""

    def __init__(self) -> None:
        self.port = 0
        self._snapshot = Snapshot()

    def show(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client wants them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self._snapshot
        findings = CounterMetricFamily("rollproof_findings", "Findings by check.", labels=["check"])
        for check_id, count in snapshot.findings.items():
            findings.add_metric([check_id], count)
        yield findings
        unjudged = CounterMetricFamily(
            "rollproof_unjudged_files", "Files that could not be read further.", labels=["reason"]
        )
        for reason, count in snapshot.unjudged.items():
            unjudged.add_metric([reason], count)
        yield unjudged
        yield CounterMetricFamily(
            "rollproof_events", "Events that were judged.", value=snapshot.events
        )
        files = GaugeMetricFamily(
            "rollproof_files", "Files by what their writers do.", labels=["state"]
        )
        files.add_metric(["open"], snapshot.open)
        files.add_metric(["closed"], snapshot.closed)
        yield files


@contextmanager
def serve_metrics(port: int) -> Iterator[MetricsPage]:
    """Serve metrics on ``port`` of this machine, 0 for a free one, until the end.

    Raises:
        ExtraError: prometheus_client is not installed.
        UsageError: The port is in use.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ExtraError(
            "--metrics needs prometheus_client: pip install 'rollproof[metrics]'."
        ) from error
    page = _Page()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(page)
    try:
        server, thread = start_http_server(port, LOOPBACK, registry)
    except OSError as error:
        raise UsageError(
            f"Metrics cannot be served on port {port} of {LOOPBACK}: {error.strerror}. Choose"
            " another port, or 0 for a free one."
        ) from error
    page.port = int(server.server_port)
    try:
        yield page
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
