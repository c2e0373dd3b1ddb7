"""The page of the API's calls, from the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TYPES = {"string": "text", "boolean": "true or false", "null": "null"}
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "maxLength": "at most {} characters",
    "default": "default {}",
}


@dataclass(frozen=True)
class FieldView:
    """A parameter, or a field of a body or reply."""

    name: str
    type: str
    limits: str


@dataclass(frozen=True)
class CallView:
    """A method and path."""

    id: str
    method: str
    path: str
    description: str
    request: Sequence[FieldView]  # parameters and fields of the body
    reply: Sequence[FieldView]


def calls_by_tag(document: Mapping[str, Any]) -> list[tuple[Mapping[str, str], list[CallView]]]:
    """Return each tag of an OpenAPI document, with name and description, and its calls."""
    calls: dict[str, list[CallView]] = {tag["name"]: [] for tag in document["tags"]}
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            calls[call["tags"][0]].append(_call(document, method, path, call))
    return [(tag, calls[tag["name"]]) for tag in document["tags"]]


def _call(document: Mapping[str, Any], method: str, path: str, call: Mapping[str, Any]) -> CallView:
    parameters = [
        _field(one["name"], one["schema"], required=one["required"])
        for one in call.get("parameters", ())
    ]
    return CallView(
        id=call["operationId"],
        method=method.upper(),
        path=path,
        description=call.get("description", "").replace("`", ""),
        request=[*parameters, *_fields(document, call.get("requestBody", {}))],
        reply=list(_fields(document, call["responses"]["200"])),
    )


def _fields(document: Mapping[str, Any], message: Mapping[str, Any]) -> Iterator[FieldView]:
    """Yield the fields of a JSON body or reply; the rows of a list have fields `list[].field`."""
    schema = message.get("content", {}).get("application/json", {}).get("schema", {})
    yield from _properties(document, schema, "")


def _properties(
    document: Mapping[str, Any], schema: Mapping[str, Any], prefix: str
) -> Iterator[FieldView]:
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield _field(prefix + name, field, required=name in required)
        rows = field.get("items", {})
        if "$ref" in rows:
            yield from _properties(document, rows, f"{prefix}{name}[].")


def _field(name: str, schema: Mapping[str, Any], *, required: bool) -> FieldView:
    types = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"] or [schema]
    limits = ["required"] if required else []
    for one in types:
        limits += [text.format(_number(one[key])) for key, text in LIMITS.items() if key in one]
    return FieldView(name, " or ".join(_type(one) for one in types), ", ".join(limits))


def _number(value: Any) -> str:
    """Return a limit or default as text; OpenAPI documents write some whole limits as floats."""
    return (
        f"{value:,.0f}" if isinstance(value, (int, float)) and value == int(value) else str(value)
    )


def _type(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return "list"
    kind = str(schema.get("type", "any"))
    return TYPES.get(kind, kind)
