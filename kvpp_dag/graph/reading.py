"""Read JSON that somebody else may have written: typed, in bounded time and memory, with the place of an error."""

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvpp_dag.errors import DumpError

MAX_VALUES = 6_000_000
"""Values of one dump; 10^6 recorded events have 4.0 million."""

MAX_OBJECTS = 200_000
"""Objects of one dump: nodes, edges and forwards. One takes about a kilobyte while it is read."""

MAX_KEYS = 32
"""Keys of one object. Our objects have fixed fields; what grows is in arrays."""

MAX_GRAPH_SIZE = 16 << 20
"""Characters of the text or JSON form of one graph."""

Model = TypeVar("Model", bound=BaseModel)


def check_size(text: str) -> None:
    """Raise DumpError if `text` is too long for the dump of one graph."""
    if len(text) > MAX_GRAPH_SIZE:
        raise DumpError(
            f"At the file: a graph dump of {len(text)} characters; at most {MAX_GRAPH_SIZE} are read."
        )


def read_model(model: type[Model], text: str) -> Model:
    """Read `text` as `model`. Raises DumpError that names the place.

    Lists of `model` should fail fast, since every further error costs memory. What JSON itself leaves open is
    refused here: repeated keys, NaN and infinities.
    """
    _check_json(text)
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(_shown, first["loc"])) or "the file"
        raise DumpError(f"At {place}: {first['msg']}.") from error


def _check_json(text: str) -> None:
    """Raise DumpError unless `text` is JSON without repeated keys, of bounded size and depth."""
    values = text.count(",") + text.count("[") + text.count("{")
    if values > MAX_VALUES:
        raise DumpError(f"At the file: it holds about {values} values; at most {MAX_VALUES} are read.")
    objects = text.count("{")
    if objects > MAX_OBJECTS:
        raise DumpError(
            f"At the file: it holds about {objects} objects; at most {MAX_OBJECTS} are read."
        )
    try:
        json.loads(text, object_pairs_hook=_check_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        place = f"the file, line {error.lineno} column {error.colno}"
        raise DumpError(f"At {place}: this is not JSON: {error.msg}.") from error
    except RecursionError as error:
        raise DumpError("At the file: its arrays and objects are nested too deeply.") from error
    except ValueError as error:
        raise DumpError(f"At the file: {error}") from error


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    """Look at the keys of an object; its content is dropped, since the model reads it again."""
    if len(pairs) > MAX_KEYS:
        raise DumpError(f"At the file: an object has {len(pairs)} keys; expected at most {MAX_KEYS}.")
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise DumpError(f"At the file: the key {_shown(key)} occurs twice in one object.")
        seen.add(key)


def _refuse_constant(name: str) -> None:
    raise DumpError(f"At the file: {name} is no number that JSON has; expected integers.")


def _shown(part: str | int) -> str:
    """A part of a place, fit for a terminal: names that a dump made up are cut and escaped."""
    text = str(part)
    plain = len(text) <= 40 and text.isascii() and text.replace("_", "").isalnum()
    return text if plain else ascii(text[:80])
