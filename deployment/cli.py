"""`dflash-serve`: serve, down, demo, generate. A user's mistake is one sentence on stderr and exit code 2."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from deployment.generate import generate

if TYPE_CHECKING:
    from deployment.settings import AppArgs

# Ray, Serve and torch take seconds to import: `--help` and a mistyped option should not wait for them.

app = typer.Typer(
    name="dflash-serve",
    help="Qwen3.5-family models with DFlash and DFlash2 speculative decoding, in sessions that survive and move.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(generate)

AppName = Annotated[str, typer.Option("--app", help="Name of the Serve application.")]
Address = Annotated[str | None, typer.Option(help="A running Ray cluster (auto, HOST:PORT); default: one of its own.")]


@app.command()
def serve(
    model: Annotated[Path | None, typer.Option(help="Model directory; default: the embedded demo model.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft checkpoint's directory.")] = None,
    backend: Annotated[str, typer.Option(help="none, dflash or dflash2.")] = "dflash2",
    draft_tokens: Annotated[int | None, typer.Option(help="Drafted tokens a round, 1 to 15.")] = None,
    draft_causal: Annotated[
        str, typer.Option(help="auto, true or false: see the checkpoint's documentation.")
    ] = "auto",
    model_name: Annotated[str | None, typer.Option(help="The name that clients use.")] = None,
    replicas: Annotated[int, typer.Option(help="Engines, each with its own copy of the model.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    lanes: Annotated[int, typer.Option(help="Turns that decode together on a replica.")] = 4,
    context: Annotated[
        int | None, typer.Option(help="Limit of prompt and answer in tokens; default: the model's.")
    ] = None,
    images: Annotated[int, typer.Option(help="Checkpoints that a replica keeps on its device.")] = 64,
    prefill_chunk: Annotated[int, typer.Option(help="Tokens of one prefill slice.")] = 512,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    app_name: AppName = "dflash",
    address: Address = None,
) -> None:
    """Serves a model over HTTP until Ctrl-C."""
    given = {"model": model, "draft": draft, "draft_tokens": draft_tokens, "model_name": model_name, "context": context}
    with one_sentence():
        args = settings(
            backend=backend,
            draft_causal=draft_causal,
            replicas=replicas,
            device=device,
            dtype=dtype,
            lanes=lanes,
            images=images,
            prefill_chunk=prefill_chunk,
            **{name: value for name, value in given.items() if value is not None},
        )
        if address is None:
            from deployment.preflight import check_directories

            check_directories(args)
        from deployment.local import running, until_interrupted

        with running(args, host=host, port=port, app=app_name, address=address) as url:
            typer.echo(f"{args.model_id} is served at {url}/v1 by {args.replicas} replicas. Ctrl-C ends it.")
            until_interrupted()


@app.command()
def down(app_name: AppName = "dflash", address: Address = None) -> None:
    """Deletes the application and its detached actors, with all sessions they hold, from a running cluster."""
    with one_sentence():
        from deployment.local import take_down

        actors = take_down(app_name, address)
        typer.echo(f"{app_name} is down; {actors} detached actors ended.")


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server up at the end, until Ctrl-C.")] = False,
    port: Annotated[int | None, typer.Option(help="Port; default: 8000, or a free one.", min=1, max=65535)] = None,
) -> None:
    """Serves the embedded model on two replicas, and shows what a session survives."""
    with one_sentence():
        from deployment.demo import run

        raise typer.Exit(run(port, keep))


def settings(**values: Any) -> AppArgs:
    """Raises ValueError with one sentence that names the option."""
    from pydantic import ValidationError

    from deployment.settings import AppArgs

    try:
        return AppArgs(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{place}: {message}, got {first['input']!r}" if place else message) from None


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Errors that a person can mend become one sentence; Ctrl-C ends quietly."""
    # A process started in the background of a script ignores SIGINT, and Python then installs no handler of its own.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("ended.", err=True)
        raise typer.Exit(130) from None
    except ValueError as error:  # ModelError is one
        fail(str(error), 2)
    except RuntimeError as error:
        if type(error).__name__ != "LaunchError":
            raise
        fail(str(error), 2)


def fail(message: str, code: int) -> NoReturn:
    typer.echo(f"dflash-serve: {message}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
