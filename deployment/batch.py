"""`dflash-serve generate --batch`: many prompts of a file through one engine, answers in the order of the file.

Every line is a JSON object: one of `prompt`, `prompt_ids` and `messages`, an `id` of the caller's choice, and any field
of a chat completion that says how to continue it; what a line leaves out is as the command's options say. A file with a
malformed line is refused before anything runs. A line that the model refuses gets a record with `error`, and the others
go on.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from pydantic import Field, StrictInt, StrictStr
from rich.console import Console
from rich.progress import Progress

from deployment.body_reading import asks_nothing, parse
from deployment.content_parts import chat_part, parts_of
from deployment.engine.commands import Grammar, Submit
from deployment.engine.errors import INVALID_REQUEST
from deployment.engine.events import Failed
from deployment.engine.loading import Models
from deployment.engine.options import EngineOptions
from deployment.errors import RequestError, invalid
from deployment.json_reading import read_json, shown
from deployment.offline import Answer, Asked, Source, fitted, run, submits_of
from deployment.request_reading import continues, tool_use
from deployment.schemas import NEUTRAL, Message, TokenId, TurnBody
from deployment.turns import seed_of, top_k_of

NOT_IN_A_BATCH = ("model", "store", "stream", "stream_options", "priority", "queue_seconds")


class LineBody(TurnBody):
    """One line. `regex` and `lark` stand beside `response_format`, as on the command line."""

    id: StrictStr | StrictInt | None = None
    prompt: StrictStr | None = None
    prompt_ids: list[TokenId] | None = None
    messages: list[Message] = Field(default_factory=list)
    regex: StrictStr | None = None
    lark: StrictStr | None = None

    @property
    def source(self) -> Source:
        messages = tuple(message.model_dump(exclude_none=True) for message in self.messages)
        ids = None if self.prompt_ids is None else tuple(self.prompt_ids)
        return Source(self.prompt, ids, messages or None)


@dataclass(frozen=True)
class Line:
    """`number` counts the lines of the file from 1."""

    number: int
    id: str | int | None
    source: Source
    asked: Asked


def read_lines(path: str, defaults: Asked) -> list[Line]:
    """All lines of a file, or of stdin for "-"; empty ones are left out. Raises ValueError naming line and field."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--batch is {path!r}, must be a file that can be read: {error.strerror}") from None
    lines = [
        _line(path, number, text, defaults) for number, text in enumerate(data.split(b"\n"), start=1) if text.strip()
    ]
    if not lines:
        raise ValueError(f"--batch is {path!r}, must have at least one line")
    return lines


def _line(path: str, number: int, text: bytes, defaults: Asked) -> Line:
    try:
        document = read_json(text)
        for name, value in document.items() if isinstance(document, dict) else ():
            if name in NOT_IN_A_BATCH:
                raise invalid(f"{name}: has no meaning in a batch", name)
            if (
                name not in LineBody.model_fields and name not in NEUTRAL
            ):  # clients add fields, a file's author misspells
                raise invalid(f"{name}: {shown(value)} is not supported", name)
        body = parse(LineBody, document)
        _check(body, document)
        asked = asked_of(body, defaults)
    except RequestError as error:
        raise ValueError(f"{path}, line {number}: {error.refused.message}") from None
    return Line(number, body.id, body.source, asked)


def _check(body: LineBody, document: dict[str, Any]) -> None:
    """What no field says alone. `document`: that the body was read from. Raises RequestError."""
    if sum((body.prompt is not None, body.prompt_ids is not None, bool(body.messages))) != 1:
        raise invalid("prompt: must have exactly one of prompt, prompt_ids and messages", "prompt")
    if sum(given is not None for given in (body.response_format, body.regex, body.lark)) > 1:
        raise invalid("response_format: must have at most one of response_format, regex and lark", "response_format")
    if media := parts_of(body.source.messages or (), chat_part).media:
        raise invalid(f"{media[0].place}: images and videos are not supported in a batch", media[0].place)
    for name in _OF_THE_TEMPLATE if not body.messages else ():
        if not asks_nothing(name, document):
            raise invalid(f"{name}: needs messages, which the template renders", name)
    if body.tools and body.tool_choice != "none" and (body.regex is not None or body.lark is not None):
        raise invalid("tools: an answer that may be a call has no other form, such as regex or lark", "tools")


_OF_THE_TEMPLATE = (
    "chat_template_kwargs",
    "reasoning_effort",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "continue_final_message",
    "add_generation_prompt",
)

_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "reproducible",
    "logprobs_mode",
)
_AS_THEY_ARE = ("n", "ignore_eos", "drafting", "thinking_budget")


def asked_of(body: LineBody, defaults: Asked) -> Asked:
    """`defaults` with what a line says itself; null says nothing. Raises RequestError."""
    given = {name: value for name in body.model_fields_set if (value := getattr(body, name)) is not None}
    sampling: dict[str, Any] = {name: given[name] for name in _SAMPLING if name in given}
    if "top_k" in given:
        sampling["top_k"] = top_k_of(given["top_k"])
    if "logit_bias" in given:
        sampling["logit_bias"] = body.bias
    if "logprobs" in given:
        sampling["logprobs"] = body.alternatives
    asked: dict[str, Any] = {name: given[name] for name in _AS_THEY_ARE if name in given}
    if body.token_budget is not None:
        asked["max_tokens"] = body.token_budget
    if "seed" in given:
        asked["seed"] = seed_of(given["seed"])
    if "stop_token_ids" in given:
        asked["stop_ids"] = tuple(given["stop_token_ids"])
    if "stop" in given:
        asked["stop_strings"] = tuple(given["stop"])
    if "include_stop_str_in_output" in given:
        asked["include_stop_string"] = given["include_stop_str_in_output"]
    if body.thinks is not None:
        asked["enable_thinking"] = body.thinks
    if body.preserves_thinking is not None:
        asked["preserve_thinking"] = body.preserves_thinking
    if body.messages:
        asked["continues"] = continues(body, "history")
    asked |= _tools(body, defaults)
    if body.grammar is not None or (body.response_format is not None and not body.tools):
        asked["grammar"] = body.grammar
    for kind in ("regex", "lark"):
        if kind in given:
            asked["grammar"] = Grammar(kind, given[kind])
    return replace(defaults, sampling=replace(defaults.sampling, **sampling), **asked)


def _tools(body: LineBody, defaults: Asked) -> dict[str, Any]:
    """What a line says of tools, in the place of the options' ones. Raises RequestError."""
    if not body.tools and defaults.tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if name in body.model_fields_set:
                raise invalid(f"{name}: needs tools in the same line; those of --tools go by --tool-choice", name)
        return {} if body.tools is None else {"tools": None, "grammar": None}
    use = tool_use(body)
    return {} if use is None else {"tools": tuple(use.tools), "grammar": use.grammar}


# ------------------------------------------------------------------------------------------------ running


class Records:
    """Writes records in the order of the file, each line's as soon as it and those before it are whole."""

    def __init__(self, out: TextIO, lines: Sequence[Line]) -> None:
        self.failed = 0
        self._out = out
        self._unwritten = deque(lines)
        self._records: dict[int, list[dict[str, Any]]] = {line.number: [] for line in lines}

    def add(self, line: Line, choice: int, content: dict[str, Any]) -> int:
        """Takes the record of one choice. Returns how many lines were written."""
        self.failed += "error" in content
        record = {"id": line.id, "line": line.number, "choice": choice, **content}
        self._records[line.number].append(record)
        written = 0
        while self._unwritten and len(self._records[self._unwritten[0].number]) == self._unwritten[0].asked.n:
            whole = self._records.pop(self._unwritten.popleft().number)
            for record in sorted(whole, key=lambda record: record["choice"]):
                self._out.write(json.dumps(record, ensure_ascii=False) + "\n")
            written += 1
        self._out.flush()
        return written


def run_batch(models: Models, options: EngineOptions, lines: Sequence[Line], out: TextIO, progress: bool | None) -> int:
    """Runs all lines and writes their records. Returns how many of them are errors.

    `progress`: a bar on stderr; None: if that is a terminal.
    """
    records, submits, line_of, refused = Records(out, lines), list[Submit](), dict[str, Line](), list[_Refusal]()
    for line in lines:
        try:
            turns = submits_of(models, f"line-{line.number}", line.source, line.asked)
        except ValueError as error:
            refused.append((line, str(error)))
            continue
        submits += turns
        line_of |= dict.fromkeys((submit.turn for submit in turns), line)
    answers = {submit.turn: Answer(submit, models, options.backend) for submit in submits}
    with _bar(progress) as bar:
        task = bar.add_task("lines", total=len(lines))
        for line, message in refused:
            for choice in range(line.asked.n):
                bar.advance(task, records.add(line, choice, _error(INVALID_REQUEST, message, None)))
        for submit, event in run(models, fitted(options, models, submits), submits):
            if isinstance(event, Failed):
                content = _error(event.code, event.message, event.param)
            elif result := answers[submit.turn].take(event):
                content = asdict(result)
            else:
                continue
            bar.advance(task, records.add(line_of[submit.turn], submit.sampling.sub, content))
    return records.failed


_Refusal = tuple[Line, str]


def _error(code: str, message: str, param: str | None) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "param": param}}


def _bar(progress: bool | None) -> Progress:
    console = Console(stderr=True, force_terminal=progress or None)
    shown = console.is_terminal if progress is None else progress
    # rich would take stdout to the terminal of stderr, where no file is
    return Progress(console=console, disable=not shown, redirect_stdout=False)


@contextlib.contextmanager
def opened(output: str | None, batch: str) -> Iterator[TextIO]:
    """Where records go: a file, or stdout. Raises ValueError where it cannot be written."""
    if output is None:
        yield sys.stdout
        return
    try:
        if batch != "-" and Path(output).exists() and Path(output).samefile(batch):
            raise ValueError(f"--output is {output!r}, must be another file than --batch")
        Path(output).write_text("")  # whether it can be written; what fails later is not for its name
    except OSError as error:
        raise ValueError(f"--output is {output!r}, must be a file that can be written: {error.strerror}") from None
    with Path(output).open("w", encoding="utf-8") as out:
        yield out
