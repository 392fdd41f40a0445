"""How the processes of a deployment log: through Ray Serve's handlers, so that all lines of one come to one place."""

from __future__ import annotations

import logging

from ray.serve.context import ReplicaContext
from ray.serve.schema import LoggingConfig

from deployment.engine.log_lines import SERVE, JsonLines, LogOptions, SpokenOf, log_through


def serves_part(options: LogOptions) -> LoggingConfig | None:
    """What Serve is told of it. None: nothing was asked for, and it is left to Serve's own settings."""
    if (options.form, options.level) == ("text", "INFO"):
        return None
    return LoggingConfig(encoding="JSON" if options.form == "json" else "TEXT", log_level=options.level)


def set_up(options: LogOptions, context: ReplicaContext) -> None:
    """In a process of a deployment, after Serve's own set-up."""
    # In its files Serve says by itself where a line comes from, under these names.
    always = {
        "application": context.app_name,
        "deployment": f"{context.app_name}_{context.deployment}",
        "replica": context.replica_id.unique_id,
    }
    serve = logging.getLogger(SERVE)
    if serves_part(options) is not None:
        serve.setLevel(options.level)
    for handler in serve.handlers:
        if not any(isinstance(known, SpokenOf) for known in handler.filters):
            handler.addFilter(SpokenOf())
        # Serve writes JSON to its files alone.
        if options.form == "json" and type(handler) is logging.StreamHandler:
            handler.setFormatter(JsonLines(always))
    log_through(serve.handlers, options.level)
