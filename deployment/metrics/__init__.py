"""What an operator may watch: `GET /metrics` (`docs/metrics.md`)."""
