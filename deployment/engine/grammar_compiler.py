"""From a request's grammar to the library's matcher. The only file that imports the grammar library, when asked to.

A grammar that cannot be compiled is refused before its turn waits for anything, with the place that is at fault.

Why llguidance and not xgrammar: a grammar needs no compile step over the vocabulary (a schema's matcher took under 1 ms
here; a mask 10 us at the demo model's 8k tokens and 40 to 600 us at 248k; its README states about 50 us at 128k), JSON
Schema keywords that it does not implement are refused by name, all positions of a block are masked in one threaded
call, one abi3 wheel serves every Python from 3.10 on, and it takes a `tokenizer.json` as it is.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deployment.engine import errors
from deployment.engine.commands import Grammar
from deployment.engine.errors import EngineError
from deployment.engine.tool_grammar import CLOSE, OPEN, ToolGrammar, ToolRefused, tool_grammar
from model.tokenizer import Tokenizer

KINDS = ("json_object", "json_schema", "regex", "lark", "tools")
MAX_SOURCE = 1 << 18
"""Characters of a grammar's source."""

_KEPT = 32
_MAX_THREADS = 8
_MAX_TRIES = 200
_TRIED_CHARACTERS = 1 << 16
"""And four times a schema's own: of its parts that are compiled alone, so that what is wrong in it takes no longer to
find than it took to compile."""
_MAX_LEXER_STATES = 50_000  # one or two KiB each
_WHITESPACE = r"\x20|\r?\n(\x20{0,32}|\t{0,16})"
"""Between the parts of JSON: a blank, or a new line and its indentation, so that no model fills its budget with it."""
_AFTER_THINKING = r"""start: BLANK? @answer
BLANK: /\n{1,2}/"""
"""A chat template puts blank lines between thinking and the answer, and so do models and thinking budgets."""


_EXCERPT = re.compile(r"\n +[0-9]+ \| ")
"""Begins the lines that the library shows of a grammar, which nobody but us has written."""


@dataclass(eq=False)
class Prototype:
    """`matcher`: a grammar's, before any token. All copies of it share what its lexer has learned, which has a
    limit; then another takes its place."""

    matcher: Any


class GrammarCompiler:
    """Compiles grammars for one vocabulary of `rows` tokens. `end_ids`: tokens that end a turn once its grammar is
    complete. Grammars are compiled on any threads at once, where other threads go on."""

    def __init__(self, tokenizer: Tokenizer, rows: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._rows = rows
        self._end_ids = end_ids
        self._library: Any = None
        self._vocabulary: Any = None
        self.executor: Any = None
        self._compiled: OrderedDict[_Key, Prototype] = OrderedDict()
        self._refused: OrderedDict[_Key, tuple[str, str, str | None]] = OrderedDict()
        self._lock = threading.Lock()

    def warm(self, field: str) -> None:
        """Loads the library and the vocabulary, so that the first turn does not wait. Raises EngineError if missing;
        `field` is what asks for them."""
        if self._vocabulary is not None:
            return
        try:
            import llguidance
        except ImportError as error:
            message = (
                f"{field} needs the package llguidance, which cannot be imported here ({error}); "
                "pip install 'dflash-serve[grammar]' brings it"
            )
            raise EngineError(errors.INVALID_REQUEST, message, field) from None
        if not self._end_ids:
            message = f"{field} needs an end token, but this model's generation_config.json has no eos_token_id"
            raise EngineError(errors.INVALID_REQUEST, message, field)
        self._library = llguidance
        self.executor = llguidance.LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
        self._vocabulary = llguidance.LLTokenizer(
            self._tokenizer.serialized, n_vocab=self._rows, eos_token=list(self._end_ids)
        )

    def known(self, grammar: Grammar) -> Prototype | None:
        """A grammar's prototype, if it is kept; raises EngineError if it is kept that there can be none."""
        key = _key(grammar)
        with self._lock:
            if key in self._refused:
                raise EngineError(*self._refused[key])
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        return None

    def prototype(self, grammar: Grammar) -> Prototype:
        """Raises EngineError, naming the field and the place, for a grammar that cannot be compiled. The most recent
        ones are kept, and so are the most recent refusals."""
        if (known := self.known(grammar)) is not None:
            return known
        key = _key(grammar)
        try:
            prototype = Prototype(self._compile(grammar))
        except EngineError as error:
            with self._lock:
                _keep(self._refused, key, (error.code, error.message, error.param))
            raise
        with self._lock:
            _keep(self._compiled, key, prototype)
        return prototype

    def compiled(self, grammar: Grammar) -> Any:
        """A matcher whose lexer has learned nothing yet."""
        return self._compile(grammar)

    def _compile(self, grammar: Grammar) -> Any:
        if grammar.kind not in KINDS:
            raise refused(grammar, f"the grammar's kind is {grammar.kind!r}, must be one of {', '.join(KINDS)}")
        if len(grammar.source) > MAX_SOURCE:
            message = f"the {grammar.kind} has {len(grammar.source)} characters, must be at most {MAX_SOURCE}"
            raise refused(grammar, message)
        schema = _schema(grammar)
        self.warm(grammar.field)
        tools = self._tools(grammar) if grammar.kind == "tools" else None
        source = tools.source if tools else schema or grammar.source
        try:
            compiled = self._matcher(self._parsed(grammar.kind, source, grammar.after is not None))
            fault = self._fault(grammar, schema, tools, compiled.get_error()) if compiled.is_error() else ""
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a fault in the library is no Exception, and must not end the engine
            raise refused(grammar, f"the {grammar.kind} cannot be compiled: {error}") from None
        if fault:
            raise refused(grammar, fault)
        return compiled

    def _fault(self, grammar: Grammar, schema: str, tools: ToolGrammar | None, reason: str) -> str:
        """What to say of a grammar that the library does not take, for `reason`."""
        if tools:
            return self._fault_of(tools, reason)
        place = f" at {self._place(schema, reason)}" if schema else ""
        return f"the {grammar.kind} cannot be followed{place}: {_explained(reason)}"

    def _parsed(self, kind: str, source: str, after_thinking: bool) -> str:
        """What a matcher takes."""
        library = self._library.LLMatcher
        if kind == "regex":
            parsed = library.grammar_from_regex(source)
        elif kind in ("lark", "tools"):
            parsed = json.dumps({"grammars": [{"lark_grammar": source}]})
        else:
            parsed = library.grammar_from_json_schema(source, overrides={"whitespace_pattern": _WHITESPACE})
        if not after_thinking:
            return parsed
        (answer,) = json.loads(parsed)["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": _AFTER_THINKING}, {**answer, "name": "answer"}]})

    def _matcher(self, parsed: str) -> Any:
        limits = self._library.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        return self._library.LLMatcher(self._vocabulary, parsed, log_level=0, limits=limits)

    # ------------------------------------------------------------------------------------------------ tools

    def _tools(self, grammar: Grammar) -> ToolGrammar:
        try:
            tools = tool_grammar(grammar.source)
        except ToolRefused as error:
            raise refused(grammar, str(error)) from None
        for marker in (OPEN, CLOSE):
            token = self._tokenizer.id_of(marker)
            if token is None or not self._vocabulary.is_special_token(token):
                raise refused(grammar, f"this model's tokenizer has no token {marker}, so that it cannot call tools")
        return tools

    def _fault_of(self, tools: ToolGrammar, reason: str) -> str:
        """Which parameter makes a grammar of tools impossible, of those that alone are refused too."""
        library = self._library.LLMatcher
        for rule in tools.rules:
            for schema in rule.schemas:
                wrong = library.validate_grammar(library.grammar_from_json_schema(json.dumps(schema)), self._vocabulary)
                if wrong:
                    return f"{rule.place} at {self._place(json.dumps(schema), wrong)}: {_explained(wrong)}"
            if wrong := library.validate_grammar(library.grammar_from_lark(rule.alone), self._vocabulary):
                return f"{rule.place}: {_explained(_EXCERPT.split(wrong)[0])}"
        return f"the functions cannot be followed: {_explained(reason)}"

    # ------------------------------------------------------------------------------------------------ schemas

    def _place(self, schema: str, reason: str) -> str:
        """JSON pointer of the innermost part of a schema that alone is refused for `reason`; "#" is all of it."""
        root, pointer, tries = json.loads(schema), "#", 0
        characters = _TRIED_CHARACTERS + 4 * len(schema)
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        part, found = root, True
        while found:
            found = False
            for name, inner in _parts(part):
                alone = json.dumps({**shared, **inner})
                tries, characters = tries + 1, characters - len(alone)
                if tries > _MAX_TRIES or characters < 0:
                    return pointer
                source = self._library.LLMatcher.grammar_from_json_schema(alone)
                if self._library.LLMatcher.validate_grammar(source, self._vocabulary) == reason:
                    part, pointer, found = inner, f"{pointer}/{name}", True
                    break
        return pointer


_Key = tuple[str, str, bool]


def _key(grammar: Grammar) -> _Key:
    return grammar.kind, grammar.source, grammar.after is not None


def _keep(kept: OrderedDict[_Key, Any], key: _Key, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > _KEPT:
        kept.popitem(last=False)


def _schema(grammar: Grammar) -> str:
    """The JSON schema of a JSON kind, as text; "" for the other kinds."""
    if grammar.kind == "json_object":
        return '{"type": "object"}'
    if grammar.kind != "json_schema":
        return ""
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise refused(grammar, f"the json_schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise refused(grammar, f"the json_schema is {grammar.source[:40]}, must be a JSON object")
    return grammar.source


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside a schema, with their pointers from it."""
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(inner := schema.get(keyword), dict):
            yield from ((f"{keyword}/{name}", part) for name, part in inner.items() if isinstance(part, dict))
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(inner := schema.get(keyword), list):
            yield from ((f"{keyword}/{index}", part) for index, part in enumerate(inner) if isinstance(part, dict))
    for keyword in ("items", "additionalProperties"):
        if isinstance(inner := schema.get(keyword), dict):
            yield keyword, inner


def refused(grammar: Grammar, message: str) -> EngineError:
    return EngineError(errors.INVALID_REQUEST, f"{grammar.field}: {message}", grammar.field)


def _explained(text: str) -> str:
    """The library's message on one line, without its internals."""
    return " ".join(text.replace("<non-verbose/>", "").split())
