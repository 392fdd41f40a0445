"""What is done before Ray is imported. A wrong model directory should cost a sentence, not a minute."""

from __future__ import annotations

import os
from dataclasses import replace

from deployment.api_keys import read_keys
from deployment.durable_store import check_keys
from deployment.engine.loading import load_models
from deployment.settings import AppArgs
from model.errors import ModelError


def check_files(args: AppArgs) -> None:
    """Checks all that starting would check, without reading weights, and fetches what is on the hub. Raises ModelError
    or ValueError."""
    if args.api_keys is not None:
        read_keys(args.api_keys)
    if args.durable_key_env is not None:
        check_keys(args.durable_key_env)
    options = args.engine_options()
    for name, directory in (("model", options.model), ("draft", options.draft)):
        if directory is not None and not directory.is_dir():
            raise ModelError(f"{name}: {directory} is not a directory")
    # the device is the replicas' own, which may be on another machine than this one
    load_models(replace(options, device="cpu"), dry=True)


def keep_ray_on_loopback() -> None:
    """A Ray of one's own has no business on the network: by default its processes listen on all addresses.

    Ray reads this switch when it is imported; on Windows and macOS it is the default there.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
