"""`dflash-serve bench`: a load on a running server, and what its clients saw: first tokens, gaps, speed, acceptance."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from deployment.usage import one_sentence

# httpx and rich take a while to import: `--help` and a mistyped option should not wait for them.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from deployment.load.report import Report
    from deployment.load.traffic import Load


def bench(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="DFLASH_API_KEY", help="Who asks.")] = None,
    conversations: Annotated[int, typer.Option(help="Conversations in all.")] = 32,
    at_once: Annotated[int, typer.Option(help="Conversations that go on side by side.")] = 8,
    turns: Annotated[int, typer.Option(help="Turns of each; with more than one, it is a session.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens that each turn draws.")] = 128,
    words: Annotated[int, typer.Option(help="Words that each message has, about.")] = 16,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the messages; another one is another load.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Runs a load against a running server. A turn that is refused is not tried again, but counted."""
    with one_sentence():
        from rich.console import Console

        from deployment.load.traffic import Load

        load = Load(conversations, at_once, turns, tokens, words, temperature, seed)
        told = asyncio.run(_measured(url, api_key, load, Console(stderr=True)))
        if as_json:
            typer.echo(json.dumps({"load": asdict(load), **asdict(told)}))
        else:
            Console().print(_table(told))
        if len(told.refused) and not told.tokens:
            raise ValueError(f"no turn was answered: {', '.join(told.refused)}")


async def _measured(url: str, api_key: str | None, load: Load, notes: Console) -> Report:
    """ClientError where nobody answers."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from deployment.client import AsyncClient
    from deployment.load.report import report
    from deployment.load.traffic import put
    from deployment.load.turns import TurnSeen

    shown = (TextColumn("turns"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
    async with AsyncClient(url, api_key, patience=0) as client:
        await client.models()
        with Progress(*shown, TimeElapsedColumn(), console=notes, transient=True) as progress:
            task = progress.add_task("", total=load.all_turns, said="")
            tokens, began = 0, time.perf_counter()

            def done(seen: TurnSeen) -> None:
                nonlocal tokens
                tokens += seen.tokens
                speed = tokens / (time.perf_counter() - began)
                progress.update(task, advance=1, said=f"{speed:.0f} tokens/s")

            return report(*await put(client, load, done))


def _table(told: Report) -> Table:
    from rich.table import Table

    table = Table(title=f"{told.turns} turns in {told.seconds:.1f} s")
    table.add_column("")
    for name in ("p50", "p95", "p99", "of"):
        table.add_column(name, justify="right")
    for name, spread in (("first text, cold", told.cold), ("first text, warm", told.warm), ("gap", told.gaps)):
        table.add_row(name, *map(_milliseconds, (spread.p50, spread.p95, spread.p99)), str(spread.count))
    reused = 100 * told.reused_tokens / max(1, told.prompt_tokens)
    table.add_row("tokens/s", f"{told.tokens_per_second:.1f}", "", "", f"{told.tokens} tokens")
    accepted = "-" if told.acceptance_length is None else f"{told.acceptance_length:.2f}"
    table.add_row("acceptance length", accepted, "", "", "")
    table.add_row("prompt tokens reused", f"{reused:.0f} %", "", "", str(told.prompt_tokens))
    for code, count in sorted(told.refused.items()):
        table.add_row(f"refused: {code}", "", "", "", str(count))
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"
