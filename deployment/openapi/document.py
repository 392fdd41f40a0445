"""The description of the interface in the form of OpenAPI 3.1: the routes that the application has, and what
`operations.py` says of each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from deployment.authentication import OPEN
from deployment.openapi.operations import OPERATIONS, Operation, Parameter

Schema = dict[str, Any]
Kind = type[BaseModel]

_STREAM = {"type": "string", "description": "Server-sent events, as docs/http.md and docs/api.md have them."}
_BYTES: Schema = {}


def document(api: FastAPI, version: str) -> dict[str, Any]:
    """Raises ValueError naming a route that nobody describes, or a description of none."""
    routes = get_openapi(title="", version="", routes=api.routes)["paths"]
    names = {f"{method.upper()} {path}" for path, methods in routes.items() for method in methods}
    if strange := names ^ OPERATIONS.keys():
        raise ValueError(f"deployment/openapi/operations.py and the routes differ in {', '.join(sorted(strange))}")
    models = _Models(OPERATIONS.values())
    paths: dict[str, dict[str, Any]] = {}
    for name, operation in OPERATIONS.items():
        method, path = name.split()
        paths.setdefault(path, {})[method.lower()] = _described(method, path, operation, models)
    keys = {"bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "dflash-serve", "version": version},
        "paths": paths,
        "components": {"schemas": models.definitions, "responses": _refusals(models), "securitySchemes": keys},
        "security": [{}, *({name: []} for name in keys)],
    }


def written(described: dict[str, Any]) -> str:
    """As a file, of which versions can be compared line by line."""
    return json.dumps(described, ensure_ascii=False, indent=1) + "\n"


class _Untitled(GenerateJsonSchema):
    """Without a title that only repeats a field's name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class _Models:
    """`definitions`: the schemas of all models that the operations name, and of what these consist of."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        kinds: dict[Kind, None] = {}
        bodies: set[Kind] = set()
        for operation in operations:
            told = (operation.answer, operation.error, *operation.body)
            kinds |= dict.fromkeys(kind for kind in told if isinstance(kind, type))
            bodies |= {kind for kind in operation.body if isinstance(kind, type)}
        self._refs, whole = models_json_schema(
            [(kind, "validation") for kind in kinds],
            ref_template="#/components/schemas/{model}",
            schema_generator=_Untitled,
        )
        self.definitions: dict[str, Schema] = whole["$defs"]
        for body in bodies:
            _with_null(self.definitions[self.of(body)["$ref"].rpartition("/")[2]])

    def of(self, kind: Kind) -> Schema:
        return self._refs[kind, "validation"]


def _with_null(body: Schema) -> None:
    """A field of a body that is null is one that was left out."""
    for name, schema in body["properties"].items():
        kinds = [one.get("type") for one in (schema, *schema.get("anyOf", ()))]
        if name not in body.get("required", ()) and "null" not in kinds and None not in schema.get("enum", ()):
            notes = {key: schema.pop(key) for key in ("default", "title", "description") if key in schema}
            body["properties"][name] = {"anyOf": [*schema.pop("anyOf", [schema]), {"type": "null"}], **notes}


def _described(method: str, path: str, operation: Operation, models: _Models) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", f"{method.lower()} {path}")),
        "summary": operation.help,
        "parameters": [*_in_path(path), *map(_parameter, operation.takes)],
        "responses": {
            "200": {"description": "The answer.", "content": _answer(operation, models)},
            **{
                str(status): {"$ref": f"#/components/responses/{operation.error.__name__}"}
                for status in sorted({*operation.refuses, *(() if path in OPEN else (401, 403))})
            },
        },
    }
    if operation.body:
        described["requestBody"] = {"required": operation.needs_body, "content": _body(operation, models)}
    return described


def _in_path(path: str) -> list[Schema]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _parameter(parameter: Parameter) -> Schema:
    return {"name": parameter.name, "in": parameter.where, "description": parameter.help, "schema": parameter.schema}


def _body(operation: Operation, models: _Models) -> Schema:
    if isinstance(operation.body, str):
        return {operation.body: {"schema": _BYTES}}
    schemas = [models.of(kind) for kind in operation.body]
    return {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}


def _answer(operation: Operation, models: _Models) -> Schema:
    answer = operation.answer
    if isinstance(answer, str):
        return {answer: {"schema": _STREAM if answer == "text/event-stream" else _BYTES}}
    streamed = {"text/event-stream": {"schema": _STREAM}} if operation.streams else {}
    return {"application/json": {"schema": models.of(answer)}, **streamed}


def _refusals(models: _Models) -> Schema:
    """Each operation's are one of these."""
    return {
        error.__name__: {"description": error.__doc__, "content": {"application/json": {"schema": models.of(error)}}}
        for error in {operation.error: None for operation in OPERATIONS.values()}
    }
