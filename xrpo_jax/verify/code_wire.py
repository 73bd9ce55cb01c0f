"""Values as lines of JSON between a program that nobody trusts and what judges it.

Only plain data crosses: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset,
dict and slices, each of exactly that type, for a subclass may compare as it likes. All else crosses
as a reference that only its own side can follow. Reading builds plain data and runs nothing.
This file is also copied into the sandboxes, so it imports json alone.
"""

import json

WHOLE = 2**53  # whole numbers below it are plain JSON; larger ones are hexadecimal text
GROUPS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Refused(ValueError):
    """A value or a line that does not cross."""


def encode(value, refer):
    """A JSON value; `refer(value)` gives [tag, ...] for what is not plain, or raises."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -WHOLE < value < WHOLE else ["int", hex(value)]
    if kind is float:
        return value if value - value == 0 else ["float", repr(value)]
    if kind is complex:
        return ["complex", repr(value.real), repr(value.imag)]
    if kind is bytes or kind is bytearray:
        return [kind.__name__, value.hex()]
    if kind is dict:
        return ["dict", [[encode(a, refer), encode(b, refer)] for a, b in value.items()]]
    if kind is slice:
        parts = value.start, value.stop, value.step
        return ["slice", [encode(part, refer) for part in parts]]
    if kind.__name__ in GROUPS and kind is GROUPS[kind.__name__]:
        return [kind.__name__, [encode(part, refer) for part in value]]
    return refer(value)


def decode(value, follow):
    """The value again; `follow(list)` gives what another tag stands for. Raises Refused."""
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise Refused("an object")
        return value
    tag, rest = value[0], value[1:]
    try:
        if tag in GROUPS:
            return GROUPS[tag]([decode(part, follow) for part in rest[0]])
        if tag == "dict":
            return {decode(a, follow): decode(b, follow) for a, b in rest[0]}
        if tag == "int":
            return int(rest[0], 16)
        if tag == "float":
            return float(rest[0])
        if tag == "complex":
            return complex(float(rest[0]), float(rest[1]))
        if tag == "bytes":
            return bytes.fromhex(rest[0])
        if tag == "bytearray":
            return bytearray.fromhex(rest[0])
        if tag == "slice":
            return slice(*(decode(part, follow) for part in rest[0]))
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise Refused(f"{tag} ({error})") from None
    return follow(value)


def dumps(message):
    """A message as one line of bytes; raises Refused where it is nested too deep."""
    try:
        return json.dumps(message).encode() + b"\n"
    except (RecursionError, ValueError) as error:
        raise Refused(str(error)) from None


def loads(line):
    """A message, which must be a JSON object; raises Refused."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(str(error)) from None
    if not isinstance(message, dict):
        raise Refused("no object")
    return message
