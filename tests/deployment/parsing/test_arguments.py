"""Written values become JSON of the types that the schema allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployment.parsing.arguments import arguments_of
from deployment.parsing.tool_calls import WrittenCall


def value(text: str, schema: Any, **root: Any) -> Any:
    parameters = {"type": "object", "properties": {"a": schema}, **root}
    return json.loads(arguments_of(WrittenCall("f", (("a", text),)), parameters))["a"]


@pytest.mark.parametrize(
    ("text", "schema", "read"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5.0", {"type": "number"}, 5.0),
        ("1e999", {"type": "number"}, "1e999"),
        ("NaN", {"type": "number"}, "NaN"),
        ("five", {"type": "integer"}, "five"),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("True", {"type": "string"}, "True"),
        ("1", {"type": "boolean"}, "1"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("nullable", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "nullable"),
        ("[1, 2]", {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("[NaN]", {"type": "array"}, "[NaN]"),
        ('{"b": [null]}', {"type": "object"}, {"b": [None]}),
        ('{"b": 1}', {"type": "string"}, '{"b": 1}'),
        ('{"b": 1}', {"properties": {"b": {}}, "type": "object"}, {"b": 1}),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"const": "2"}, "2"),
        ("2", {"$ref": "#/$defs/n"}, 2),
        ("2", {"$ref": "#/$defs/s"}, "2"),
        ("2", {"$ref": "#/$defs/loop"}, 2),
        ("2", {"allOf": [{"$ref": "#/$defs/s"}]}, "2"),
        ("2", {"oneOf": [{"$ref": "#/$defs/s"}, {"type": "boolean"}]}, "2"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ('"quoted"', {"type": "string"}, '"quoted"'),
        ("5", {}, 5),
        ("5", True, 5),
        ("five", {}, "five"),
        ("5", {"type": 3}, 5),
    ],
)
def test_a_value_is_json_of_a_type_that_its_schema_allows_or_else_the_text(text: str, schema: Any, read: Any):
    shared = {"n": {"type": "integer"}, "s": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    found = value(text, schema, **{"$defs": shared})
    assert found == read and type(found) is type(read)


def test_parameters_that_no_schema_names_are_text_unless_it_says_what_others_are():
    assert value("5", {"type": "integer"}, properties={}) == "5"
    assert value("5", None, properties={}, additionalProperties={"type": "integer"}) == 5
    assert arguments_of(WrittenCall("f", (("a", "5"),)), None) == '{"a": "5"}'


def test_arguments_keep_their_order_and_their_characters():
    call = WrittenCall("f", (("z", "ü"), ("a", "x\ny")))
    assert arguments_of(call, {}) == '{"z": "ü", "a": "x\\ny"}' and arguments_of(WrittenCall("f", ()), {}) == "{}"


def test_a_schema_whose_references_branch_without_end_is_read_in_no_time():
    again = {"$ref": "#/$defs/a"}
    root = {"$defs": {"a": {"anyOf": [again] * 16}}, "properties": {"x": again}}
    call = WrittenCall("f", (("x", "4"),))
    assert arguments_of(call, root) == '{"x": 4}'
