"""`dflash-serve`: what can be asked of it on a command line. A mistake is one sentence and exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployment.bench_command import bench
from deployment.chat import chat
from deployment.check_model import check_model
from deployment.generate import generate
from deployment.state_command import app as state_app
from deployment.usage import one_sentence

# Ray, Serve and torch take seconds to import: `--help` and a mistyped option should not wait for them.

app = typer.Typer(
    name="dflash-serve",
    help="Qwen3.5-family models with DFlash and DFlash2 speculative decoding, in sessions that survive and move.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(chat)
app.command()(bench)
app.command()(generate)
app.command("check-model")(check_model)
app.add_typer(state_app, name="state")

AppName = Annotated[str, typer.Option("--app", help="Name of the Serve application.")]
Address = Annotated[str | None, typer.Option(help="A running Ray cluster (auto, HOST:PORT); default: one of its own.")]


@app.command()
def serve(
    model: Annotated[
        Path | None, typer.Option(help="Directory, or name on the Hugging Face hub; default: the embedded demo model.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="The draft checkpoint's; auto: the public one of the model.")
    ] = None,
    backend: Annotated[str, typer.Option(help="none, dflash or dflash2.")] = "dflash2",
    draft_tokens: Annotated[int | None, typer.Option(help="Drafted tokens a round, 1 to 15.")] = None,
    draft_tokens_by_lanes: Annotated[
        str | None, typer.Option(help="Another K from so many decoding lanes on, as in 3:7,8:0.")
    ] = None,
    draft_causal: Annotated[
        str, typer.Option(help="auto, true or false: see the checkpoint's documentation.")
    ] = "auto",
    proposal_head: Annotated[Path | None, typer.Option(help="Index file of the token ids that may be drafted.")] = None,
    yarn_factor: Annotated[float | None, typer.Option(help="Stretch the model's positions by YaRN, 1 to 4.")] = None,
    public_rows: Annotated[
        int | None, typer.Option(help="Vocabulary rows that may be chosen; default: all known.")
    ] = None,
    model_name: Annotated[
        list[str] | None,
        typer.Option("--model-name", "--served-model-name", help="The name that clients use; others are aliases."),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Engines, each with its own copy of the model.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    lanes: Annotated[int, typer.Option(help="Turns that decode together on a replica.")] = 4,
    context: Annotated[
        int | None, typer.Option(help="Limit of prompt and answer in tokens; default: the model's.")
    ] = None,
    images: Annotated[int, typer.Option(help="Checkpoints that a replica keeps on its device.")] = 64,
    image_min_tokens: Annotated[
        int | None, typer.Option(help="Tokens since the last checkpoint that are not worth one; default: by its size.")
    ] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Tokens of one prefill slice; default: 512 on a CPU, 2048 on a GPU.")
    ] = None,
    max_stall_ms: Annotated[float, typer.Option(help="A prefill slice keeps decoding turns waiting that long.")] = 70.0,
    queue_turns: Annotated[int, typer.Option(help="Turns that may wait on a replica.")] = 1024,
    queue_seconds: Annotated[float | None, typer.Option(help="A turn may wait that long; default: no limit.")] = None,
    tenant_lanes: Annotated[int | None, typer.Option(help="Turns of one API key that run together.")] = None,
    tenant_queued_tokens: Annotated[int | None, typer.Option(help="Prompt tokens of one API key that wait.")] = None,
    tenant_state_bytes: Annotated[
        int | None, typer.Option(help="Bytes that sessions of one API key keep on a node.")
    ] = None,
    hash_all_weights: Annotated[
        bool, typer.Option("--hash-all-weights", help="Know weights by all their bytes, not by headers and samples.")
    ] = False,
    accept_numeric_path: Annotated[
        bool, typer.Option("--accept-numeric-path", help="Load state that another library or card made.")
    ] = False,
    accept_new_weights: Annotated[
        bool, typer.Option("--accept-new-weights", help="Append turns go on from another model's tokens.")
    ] = False,
    api_keys: Annotated[
        Path | None, typer.Option(help="A file of the API keys that are taken; default: any.", resolve_path=True)
    ] = None,
    host_names: Annotated[
        str | None, typer.Option(help="Without --api-keys: this server's names on this machine, as in a.org,b.org.")
    ] = None,
    cluster_key_file: Annotated[Path | None, typer.Option(help="A secret that signs sessions.")] = None,
    durable: Annotated[
        str | None,
        typer.Option(help="An absolute path or URL where sessions outlive the cluster; default: ~/.local/state."),
    ] = None,
    durable_key_env: Annotated[
        str | None, typer.Option(help="Variable of the environment with the key it is encrypted with; default: none.")
    ] = None,
    no_durable: Annotated[bool, typer.Option("--no-durable", help="Sessions end with the cluster.")] = False,
    durable_bytes: Annotated[int | None, typer.Option(help="What they may take there; default: 16 GiB.")] = None,
    media_hosts: Annotated[
        str | None, typer.Option(help="Hosts from which images are fetched, as in a.org,*.b.org; default: none.")
    ] = None,
    media_items: Annotated[int, typer.Option(help="Images and videos that a request may have.")] = 32,
    media_bytes: Annotated[int, typer.Option(help="Bytes that one of them may have.")] = 20 << 20,
    media_pixels: Annotated[int, typer.Option(help="Pixels that an image may have.")] = 50_000_000,
    detach_seconds: Annotated[
        float, typer.Option(help="A session's turn goes on that long while nobody reads it.")
    ] = 30.0,
    log_format: Annotated[str, typer.Option(help="text, or json: session, turn and epoch as fields.")] = "text",
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_texts: Annotated[bool, typer.Option("--log-texts", help="JSON lines have prompts and answers too.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate in PEM, with its chain: then HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key in PEM, without a password.")] = None,
    app_name: AppName = "dflash",
    address: Address = None,
) -> None:
    """Serves a model over HTTP until Ctrl-C."""
    with one_sentence():
        from deployment.settings import AppArgs
        from deployment.tls import Tls

        tls = Tls.of(tls_cert, tls_key)
        if no_durable and (durable is not None or durable_bytes is not None):
            raise ValueError("give --durable and --durable-bytes, or --no-durable")
        args = AppArgs.of(
            model=model,
            draft=draft,
            draft_tokens=draft_tokens,
            draft_tokens_by_lanes=draft_tokens_by_lanes,
            model_name=model_name[0] if model_name else None,
            model_aliases=model_name[1:] if model_name else None,
            detach_seconds=detach_seconds,
            context=context,
            backend=backend,
            draft_causal=draft_causal,
            proposal_head=proposal_head,
            yarn_factor=yarn_factor,
            public_rows=public_rows,
            replicas=replicas,
            device=device,
            dtype=dtype,
            lanes=lanes,
            images=images,
            image_min_tokens=image_min_tokens,
            prefill_chunk=prefill_chunk,
            max_stall_ms=max_stall_ms,
            queue_turns=queue_turns,
            queue_seconds=queue_seconds,
            tenant_lanes=tenant_lanes,
            tenant_queued_tokens=tenant_queued_tokens,
            tenant_state_bytes=tenant_state_bytes,
            hash_all_weights=hash_all_weights,
            accept_numeric_path=accept_numeric_path,
            accept_new_weights=accept_new_weights,
            api_keys=api_keys,
            host_names=host_names,
            cluster_key_file=cluster_key_file,
            durable="none" if no_durable else durable,
            durable_bytes=durable_bytes,
            durable_key_env=durable_key_env,
            media_hosts=media_hosts,
            media_items=media_items,
            media_bytes=media_bytes,
            media_pixels=media_pixels,
            log_format=log_format,
            log_level=log_level.upper(),
            log_texts=log_texts,
        )
        if address is None:
            from deployment.preflight import check_files, keep_ray_on_loopback

            check_files(args)
            keep_ray_on_loopback()
        from deployment.local import resumed, running, until_interrupted

        with running(args, host=host, port=port, app=app_name, address=address, tls=tls) as url:
            if (found := resumed(app_name)) is not None:
                count, place = found
                typer.echo(f"resumed {count} sessions from {place}" if count else f"sessions are kept in {place}")
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
        from deployment.preflight import keep_ray_on_loopback

        keep_ray_on_loopback()
        from deployment.demo import run

        raise typer.Exit(run(port, keep))


@app.command()
def openapi() -> None:
    """Prints the description of the HTTP interface, as OpenAPI 3.1; a server has it at /openapi.json."""
    with one_sentence():
        from deployment.ingress import VERSION, api
        from deployment.openapi.document import document, written

        typer.echo(written(document(api, VERSION)), nl=False)


if __name__ == "__main__":
    app()
