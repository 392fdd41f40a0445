"""Starts the application from this process: on a Ray of its own, or on a cluster that is already there."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError

from deployment.app import build
from deployment.cluster.names import directory_name, named_actor, remove
from deployment.durable_place import default_place, held
from deployment.logs import serves_part
from deployment.settings import DEFAULT_PLACE, AppArgs
from deployment.tls import Tls

APP = "dflash"
"""The Serve application's name, unless told otherwise. The detached actors' names begin with it."""

CONNECT_SECONDS = 5.0
RESUMED_SECONDS = 10.0

OBJECT_STORE_BYTES = 160 << 20
"""Only checkpoints on their way pass through the object store; Ray's default would take a third of the memory."""


class LaunchError(RuntimeError):
    """The application could not be started. The message is one sentence."""


def port_is_free(host: str, port: int) -> bool:
    return why_not(host, port) is None


def why_not(host: str, port: int) -> str | None:
    """What keeps a server from listening there, in a few words; None if nothing does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return "the port is in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).lower()
    return None


@contextlib.contextmanager
def running(
    args: AppArgs,
    *,
    host: str,
    port: int,
    app: str = APP,
    address: str | None = None,
    quiet: bool = False,
    tls: Tls | None = None,
) -> Iterator[str]:
    """The application, up and healthy, at the URL that this yields; taken down afterwards.

    Without an `address` Ray is started here, for this process alone. `quiet` keeps the logs of Ray's processes in their
    files, and silences stdout and stderr meanwhile: who wants to print holds on to the stream. Raises LaunchError, and
    ValueError where another server has the default place of sessions.
    """
    if address is None and (reason := why_not(host, port)) is not None:
        raise LaunchError(f"cannot listen on port {port} of {host}: {reason}; choose another one with --port or --host")
    # Ray writes its cluster token with the umask's rights: nobody else on this machine should read it.
    os.umask(0o077)
    if quiet:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        if quiet:
            stack.enter_context(_silenced())
        if address is None and args.durable == DEFAULT_PLACE:
            stack.enter_context(held(default_place(app)))
        stack.callback(_disconnect, app, address)
        _connect(address, log_to_driver=not quiet)
        yield _deploy(args, app, host, port, tls)


def until_interrupted() -> None:
    """Waits for Ctrl-C, which here is how things are meant to end."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Ray tells the driver of every process that dies, whatever its log level."""
    with (
        Path(os.devnull).open("w", encoding="utf-8") as sink,
        contextlib.redirect_stderr(sink),
        contextlib.redirect_stdout(sink),
    ):
        yield


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until this is over: half started, or half ended, Ray leaves processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def _disconnect(app: str, address: str | None) -> None:
    if not ray.is_initialized():
        return
    # Of a cluster that ends with this process nobody need hear how its parts end.
    with _uninterrupted(), _silenced() if address is None else contextlib.nullcontext():
        with contextlib.suppress(Exception):  # what is left goes down with the cluster
            serve.delete(app)
            remove(app)
            if address is None:
                serve.shutdown()
        ray.shutdown()


def resumed(app: str) -> tuple[int, str] | None:
    """How many sessions a new cluster goes on with, and from where; None if it is not new, has no durable tier, or is
    still looking."""
    try:
        return ray.get(named_actor(directory_name(app)).resumed.remote(), timeout=RESUMED_SECONDS)
    except (RayError, ValueError):  # who serves need not wait for who counts
        return None


def take_down(app: str, address: str | None) -> int:
    """Deletes the application and its detached actors from a running cluster; returns the number of actors.

    Raises LaunchError if there is no cluster.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    _connect(address or "auto", log_to_driver=False)
    try:
        serve.delete(app)
        return remove(app)
    finally:
        ray.shutdown()


def _connect(address: str | None, *, log_to_driver: bool) -> None:
    _check_address(address)
    own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES} if address is None else {}
    try:
        # To a cluster that does not answer Ray talks for minutes, and starts nothing meanwhile.
        with _uninterrupted() if address is None else contextlib.nullcontext():
            ray.init(
                address=address or "local",
                log_to_driver=log_to_driver,
                logging_level=logging.WARNING if log_to_driver else logging.ERROR,
                **own,
            )
    except Exception as error:  # Ray has no class of its own for a raylet that did not start in time
        where = "a local Ray could not be started" if address is None else f"no Ray cluster answers at {address!r}"
        raise LaunchError(f"{where}: {_first_line(error)}") from None


def _check_address(address: str | None) -> None:
    """Ray itself needs more than a minute to notice that nobody listens at HOST:PORT."""
    host, _, port = (address or "").rpartition(":")
    if "://" in host or not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(f"no Ray cluster answers at {address!r}: {error}") from None


def _deploy(args: AppArgs, app: str, host: str, port: int, tls: Tls | None) -> str:
    options = {"host": host, "port": port, **(tls.http_options if tls is not None else {})}
    try:
        serve.start(proxy_location="HeadOnly", http_options=options, logging_config=serves_part(args.logs))
        serve.run(build(args), name=app, route_prefix="/")
    except RuntimeError as error:
        raise LaunchError(f"the application did not start: {_cause(app) or _first_line(error)}") from None
    return url_of(host, port, tls)


def url_of(host: str, port: int, tls: Tls | None) -> str:
    """Under which a server that listens there is found from here."""
    name = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{'http' if tls is None else 'https'}://{name}:{port}"


def _cause(app: str) -> str:
    """The last line of what a replica's constructor raised: the sentence of a ModelError, for example."""
    status = serve.status().applications.get(app)
    for deployment in status.deployments.values() if status else ():
        lines = [line.strip() for line in deployment.message.splitlines() if "Error: " in line]
        if lines:
            return lines[-1].partition("Error: ")[2]
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
