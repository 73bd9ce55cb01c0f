"""The test process's line to the candidate, and what stands there for the candidate's objects.

A reference is equal to nothing but itself, and takes no part in arithmetic or order, so no object
of the candidate can answer for the right value. This file is copied into the sandbox.
"""

import builtins
import os
import select
import time

import code_wire as wire

# A candidate that raises one of these would end a loop over its results as if all were seen.
ENDS_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt)


class Gone(BaseException):
    """The candidate cannot go on: it ended, took too long, or sent what is no answer."""


class Broken(Exception):
    """The tests cannot be run here, whatever the candidate is."""


class Link:
    """The line to the candidate."""

    def __init__(self, answers, requests, most):
        self.answers, self.requests, self.most = answers, requests, most
        self.deadline, self.buffer, self.gone = 0.0, b"", ""
        self.references, self.functions, self.raised = {}, [], []
        for descriptor in (answers, requests):
            os.set_blocking(descriptor, False)

    def fail(self, why):
        self.gone = why
        raise Gone(why)

    def wait(self, read, write):
        if self.gone:
            raise Gone(self.gone)
        left = self.deadline - time.monotonic()
        if left <= 0 or not any(select.select(read, write, [], left)):
            self.fail("time limit")

    def send(self, message):
        left = wire.dumps(message)
        while left:
            self.wait([], [self.requests])
            try:
                left = left[os.write(self.requests, left) :]
            except BlockingIOError:
                continue
            except OSError:
                self.fail("ended")

    def receive(self):
        parts = [self.buffer]
        size = len(self.buffer)
        while b"\n" not in parts[-1]:
            self.wait([self.answers], [])
            try:
                part = os.read(self.answers, 65536)
            except BlockingIOError:
                continue
            if not part:
                self.fail("ended")
            parts.append(part)
            size += len(part)
            if size > self.most:
                self.fail("output limit")
        line, _, self.buffer = b"".join(parts).partition(b"\n")
        try:
            return wire.loads(line)
        except wire.Refused:
            self.fail("forged")

    def ask(self, do, on, *args, **named):
        """What the candidate answers, after the callbacks that it makes on the way."""
        message = {"do": do, "on": wire.encode(on, self.refer)}
        message["args"] = wire.encode(list(args), self.refer)
        message["kwargs"] = wire.encode(named, self.refer)
        self.send(message)
        while True:
            message = self.receive()
            if "callback" in message:
                self.send(self.called_back(message))
            elif "raised" in message:
                raise self.error(message["raised"], do)
            elif "value" in message:
                value = self.read(message["value"])
                if value is None and isinstance(message.get("changed"), list):
                    self.write_back(args, message["changed"])
                return value
            else:
                self.fail("forged")

    def read(self, encoded):
        try:
            return wire.decode(encoded, self.follow)
        except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
            self.fail("forged")

    def write_back(self, args, changed):
        """A call that returned None may have changed its arguments: so do the test's own."""
        groups = [one for one in args if type(one) in (list, dict, set)]
        for group, encoded in zip(groups, changed, strict=False):
            value = self.read(encoded)
            if type(value) is not type(group):
                continue
            group.clear()
            group.extend(value) if type(group) is list else group.update(value)

    def called_back(self, message):
        try:
            function = self.functions[message["callback"]]
            args, named = self.read(message["args"]), self.read(message["kwargs"])
        except (KeyError, IndexError, TypeError):
            self.fail("forged")
        try:
            return {"value": wire.encode(function(*args, **named), self.refer)}
        except Exception as error:
            return {"raised": {"name": type(error).__name__, "text": str(error)}}

    def refer(self, value):
        """What is no plain data on its way to the candidate."""
        number = getattr(value, "__reference__", None)
        if type(value) is Reference or (isinstance(value, type) and type(number) is int):
            return ["object", number]
        if getattr(builtins, getattr(value, "__name__", ""), None) is value:
            return ["builtin", value.__name__]
        if callable(value) and not isinstance(value, type):
            self.functions.append(value)
            return ["callback", len(self.functions) - 1]
        raise Broken(f"a {type(value).__name__} cannot be given to the program under test")

    def follow(self, tagged):
        """What is no plain data on its way from the candidate."""
        tag, name, number = tagged[0], tagged[1], tagged[-1]
        if type(name) is not str or type(number) is not int:
            raise wire.Refused(str(tag))
        if number not in self.references:
            if tag == "exception":
                base = getattr(builtins, tagged[2], None)
                fits = isinstance(base, type) and issubclass(base, Exception)
                base = base if fits and not issubclass(base, ENDS_LOOPS) else RuntimeError
                own = {"__module__": "solution", "__reference__": number}
                self.references[number] = type(name, (base,), own)
            elif tag in ("object", "module"):
                self.references[number] = Reference(self, number, name)
            else:
                raise wire.Refused(str(tag))
        return self.references[number]

    def error(self, message, do):
        """The candidate's exception, of the built-in type that it had there."""
        try:
            kind = getattr(builtins, message["name"], RuntimeError)
            args = self.read(message.get("args", ["list", []]))
            if message.get("class"):
                kind = self.read(message["class"])
            fits = isinstance(kind, type) and issubclass(kind, Exception | SystemExit)
            if not fits or (issubclass(kind, ENDS_LOOPS) and do != "next"):
                kind, args = RuntimeError, [f"{message['name']}: {message['text']}"]
            try:
                error = kind(*args)
            except Exception:
                error = RuntimeError(f"{message['name']}: {message['text']}")
        except (KeyError, TypeError):
            self.fail("forged")
        self.raised.append((error, str(message["name"])))
        return error


class Reference:
    """Something in the candidate's process: calls, attributes and items are asked of it there."""

    __slots__ = ("__link__", "__reference__", "__name__")

    def __init__(self, link, number, name):
        for slot, value in zip(self.__slots__, (link, number, name), strict=True):
            object.__setattr__(self, slot, value)

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self.__link__.ask("get", self, name)

    def __setattr__(self, name, value):
        self.__link__.ask("set", self, name, value)

    def __call__(self, *args, **named):
        return self.__link__.ask("call", self, *args, **named)

    def __getitem__(self, key):
        return self.__link__.ask("item", self, key)

    def __setitem__(self, key, value):
        self.__link__.ask("put", self, key, value)

    def __delitem__(self, key):
        self.__link__.ask("remove", self, key)

    def __instancecheck__(self, value):
        return type(value) is Reference and self.__link__.ask("instance", self, value) is True

    def __len__(self):
        return self.__link__.ask("len", self)

    def __iter__(self):
        return self.__link__.ask("iter", self)

    def __next__(self):
        return self.__link__.ask("next", self)

    def __bool__(self):
        return self.__link__.ask("bool", self) is True

    def __str__(self):
        return self.__link__.ask("str", self)

    __repr__ = __str__

    def __enter__(self):
        return self.__link__.ask("enter", self)

    def __exit__(self, *problem):
        self.__link__.ask("leave", self)
