"""Data of the page that lists the API's calls, taken from the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "maxLength": "at most {} characters",
    "default": "default {}",
}

Json = Mapping[str, Any]
Field = tuple[str, str, str]
"""Name, type and limits of a parameter, or of a field of a body or reply."""


@dataclass(frozen=True)
class CallView:
    """A call of the API: its method, path and fields."""

    id: str
    line: str  # such as `GET /health`
    description: str
    request: Sequence[Field]  # parameters and fields of the body
    reply: Sequence[Field]


def calls_by_tag(document: Json) -> list[tuple[Json, list[CallView]]]:
    """Return each tag of an OpenAPI document, with name and description, and its calls."""
    calls: dict[str, list[CallView]] = {tag["name"]: [] for tag in document["tags"]}
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            parameters = [
                _field(one["name"], one["schema"], required=one["required"])
                for one in call.get("parameters", ())
            ]
            view = CallView(
                id=call["operationId"],
                line=f"{method.upper()} {path}",
                description=call.get("description", "").replace("`", ""),
                request=[*parameters, *_fields(document, _schema(call.get("requestBody", {})))],
                reply=list(_fields(document, _schema(call["responses"]["200"]))),
            )
            calls[call["tags"][0]].append(view)
    return [(tag, calls[tag["name"]]) for tag in document["tags"]]


def _schema(message: Json) -> Json:
    schema: Json = message.get("content", {}).get("application/json", {}).get("schema", {})
    return schema


def _fields(document: Json, schema: Json, prefix: str = "") -> Iterator[Field]:
    """Yield the fields of a JSON body or reply; name those of a list's rows `list[].field`."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield _field(prefix + name, field, required=name in required)
        rows = field.get("items", {})
        if "$ref" in rows:
            yield from _fields(document, rows, f"{prefix}{name}[].")


def _field(name: str, schema: Json, *, required: bool) -> Field:
    types = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    limits = ["required"] if required else []
    for one in types:
        limits += [text.format(_number(one[key])) for key, text in LIMITS.items() if key in one]
    names = [str(one.get("const", one.get("type", "any"))) for one in types]
    return name, " or ".join(names), ", ".join(limits)


def _number(value: Any) -> str:
    """Return a limit or default as text; OpenAPI documents write some whole limits as floats."""
    whole = isinstance(value, (int, float)) and value == int(value)
    return f"{value:,.0f}" if whole else str(value)
