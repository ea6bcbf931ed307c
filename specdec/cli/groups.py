"""Groups of options: dataclasses whose fields become a command's options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a dataclass replaced by one keyword a field.

    Typer then makes an option of each field: its annotation (Annotated[type, typer.Option(...)])
    and default are the option's. The command gets the dataclasses.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        n: hint for n, hint in hints.items() if dataclasses.is_dataclass(hint)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += _field_parameters(groups[parameter.name])
        else:
            parameters.append(
                parameter.replace(
                    kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]
                )
            )

    @functools.wraps(command)
    def with_fields(**values: Any) -> None:
        for name, group in groups.items():
            given = {field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            values[name] = group(**given)
        command(**values)

    with_fields.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_fields.__annotations__ = {item.name: item.annotation for item in parameters}
    return with_fields


def _field_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]
