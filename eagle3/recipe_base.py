"""What all recipe sections share: unknown keys are errors, and which fields shape the bytes of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import cast

from pydantic import BaseModel, ConfigDict

from eagle3.records import JsonObject


@dataclass(frozen=True, slots=True)
class Operational:
    """Marks a field that does not shape the bytes a run produces."""


OPERATIONAL = Operational()


class Section(BaseModel):
    """Base of all recipe sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    def identity(self) -> JsonObject:
        """Return the values that shape bytes, as JSON: everything not marked operational that is not at its default.

        Defaults are left out so that a release with one more setting still knows its old runs and buys nothing again.
        A release that changes what a default means must raise `eagle3.artifacts.SCHEMA_VERSION`.
        """
        result: JsonObject = {}
        for name, field in type(self).model_fields.items():
            if OPERATIONAL in field.metadata:
                continue
            value = getattr(self, name)
            if name == "kind" or field.is_required() or value != field.get_default(call_default_factory=True):
                result[name] = _identity_of(value)
        return result


def _identity_of(value: object) -> object:
    if isinstance(value, Section):
        return value.identity()
    if isinstance(value, Mapping):
        return {str(key): _identity_of(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_identity_of(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, Decimal):
        return str(value)
    return value
