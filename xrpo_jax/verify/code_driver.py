"""Runs a candidate's program inside its sandbox: whole, or call by call; run as a script there.

    whole PROGRAM           as a script: its own standard input and output
    calls ENTRY PROGRAM...  a line of arguments on stdin for each call; an answer, and its end
    serve PROGRAM...        what the test process (code_checker.py) asks, until it asks no more

Nothing here is trusted: the program shares this process and may forge any line it sends. All that
it can gain by that is the value of a call, which is judged elsewhere.
"""

import builtins
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
# Packages after the standard library, where `site` would have put them.
PACKAGES = [path for path in sys.path if path.endswith("-packages")]
sys.path[:] = [path for path in sys.path if path not in PACKAGES] + PACKAGES


def make_builtins():
    """exit, quit and their kind, which come with `site`."""
    from _sitebuiltins import Quitter, _Helper

    builtins.exit, builtins.quit = Quitter("exit", "Ctrl-D"), Quitter("quit", "Ctrl-D")
    builtins.help = _Helper()


def compiled(name):
    path = os.path.join(FOLDER, name)
    with open(path, encoding="utf-8") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def whole(name):
    path = os.path.join(FOLDER, name)
    program = compiled(name)
    sys.argv[:] = [path]
    namespace = {"__name__": "__main__", "__builtins__": builtins, "__file__": path}
    main = sys.modules["__main__"]
    main.__dict__.clear()
    main.__dict__.update(namespace)
    exec(program, main.__dict__)


def load(names):
    """The globals of the program's parts, run one after the other as a module `solution`."""
    module = type(sys)("solution")
    module.__file__ = os.path.join(FOLDER, names[-1])
    sys.modules["solution"] = module
    sys.argv[:] = [module.__file__]
    for name in names:
        exec(compiled(name), module.__dict__)
    return module.__dict__


def channels():
    """Requests and answers on descriptors of their own, which no print of the program reaches."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    return requests, answers


def plain(value):
    """Known subclasses of plain types, and NumPy's scalars, as the plain values that they are."""
    kind = type(value)
    where = kind.__module__, kind.__name__
    if where in (("collections", "defaultdict"), ("collections", "OrderedDict")):
        return dict(value)
    if where == ("collections", "Counter"):
        return dict(value)
    if where[0] == "numpy" and hasattr(kind, "item") and not getattr(value, "shape", True):
        return value.item()
    return value


def described(error):
    """An exception as it crosses: the name of its class, and its text."""
    try:
        text = str(error)[:2000]
    except BaseException:
        text = ""
    return {"name": type(error).__name__, "text": text}


def found(namespace, entry):
    """The function of a name; of Class.method it is that of a new instance."""
    first, _, method = entry.partition(".")
    if first not in namespace:
        raise NameError(f"name {first!r} is not defined")
    return getattr(namespace[first](), method) if method else namespace[first]


def calls(wire, entry, names):
    requests, answers = channels()

    def answer(message):
        left = wire.dumps(message)
        while left:
            left = left[os.write(answers, left) :]

    def refuse(value):
        crossing = plain(value)
        if crossing is value:
            raise wire.Refused(f"{type(value).__name__} is no plain data")
        return wire.encode(crossing, refuse)

    try:
        namespace = load(names)
        found(namespace, entry.partition(".")[0])
    except BaseException as error:
        answer({"raised": described(error)})
        return
    answer({"loaded": True})
    for line in requests:
        # A process for each call: none sees what another one left behind.
        child = os.fork()
        if not child:
            try:
                message = wire.loads(line)
                args = wire.decode(message["args"], refuse)
                named = wire.decode(message["kwargs"], refuse)
                returned = found(namespace, entry)(*args, **named)
                try:
                    answer({"value": wire.encode(returned, refuse)})
                except (wire.Refused, RecursionError) as error:
                    answer({"refused": str(error)})
            except BaseException as error:
                answer({"raised": described(error)})
            finally:
                os._exit(0)
        answer({"ended": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


OPERATIONS = {
    "call": lambda on, *args, **named: on(*args, **named),
    "get": getattr,
    "set": setattr,
    "item": lambda on, key: on[key],
    "put": lambda on, key, value: on.__setitem__(key, value),
    "remove": lambda on, key: on.__delitem__(key),
    "instance": lambda on, value: isinstance(value, on),
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "str": str,
    "repr": repr,
    "enter": lambda on: on.__enter__(),
    "leave": lambda on: on.__exit__(None, None, None),
}


def serve(wire, names):
    requests, answers = channels()
    objects, numbers = [], {}

    def send(message):
        left = wire.dumps(message)
        while left:
            left = left[os.write(answers, left) :]

    def refer(value):
        crossing = plain(value)
        if crossing is not value:
            return wire.encode(crossing, refer)
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        number = numbers[id(value)]
        if type(value) is type(sys):
            return ["module", value.__name__, number]
        if isinstance(value, type) and issubclass(value, Exception):
            base = next(one for one in value.__mro__ if one.__module__ == "builtins")
            return ["exception", value.__name__, base.__name__, number]
        return ["object", type(value).__name__, number]

    def follow(tagged):
        tag = tagged[0]
        if tag == "object":
            return objects[tagged[1]]
        if tag == "builtin":
            return getattr(builtins, tagged[1])
        if tag == "callback":
            return lambda *args, **named: ask_back(tagged[1], args, named)
        raise wire.Refused(tag)

    def ask_back(number, args, named):
        arguments = wire.encode(list(args), refer), wire.encode(named, refer)
        send({"callback": number, "args": arguments[0], "kwargs": arguments[1]})
        message = until_answer()
        if "raised" in message:
            kind = getattr(builtins, message["raised"]["name"], RuntimeError)
            raise kind(message["raised"]["text"])
        return wire.decode(message["value"], follow)

    def until_answer():
        """Does what is asked until a callback's answer comes, or nothing more."""
        while line := requests.readline():
            message = wire.loads(line)
            if "do" not in message:
                return message
            before = []
            try:
                on = follow(message["on"])
                args = wire.decode(message["args"], follow)
                named = wire.decode(message["kwargs"], follow)
                before = [wire.encode(one, refer) for one in args if type(one) in (list, dict, set)]
                value = OPERATIONS[message["do"]](on, *args, **named)
                reply = {"value": wire.encode(value, refer)}
                if value is None and before:
                    changed = [one for one in args if type(one) in (list, dict, set)]
                    changed = [wire.encode(one, refer) for one in changed]
                    if changed != before:
                        reply["changed"] = changed
                send(reply)
            except BaseException as error:
                send({"raised": raised(error)})
        return {}

    def raised(error):
        message = described(error)
        try:
            message["args"] = wire.encode(list(error.args), refer)
            kind = type(error)
            builtin = kind.__module__ == "builtins"
            message["class"] = None if builtin else wire.encode(kind, refer)
        except BaseException:
            pass
        return message

    try:
        namespace = load(names)
    except BaseException as error:
        send({"raised": raised(error)})
        return
    send({"loaded": True})
    wanted = wire.loads(requests.readline())["names"]
    send({"names": {one: wire.encode(namespace[one], refer) for one in wanted if one in namespace}})
    until_answer()


def main():
    kind, *rest = sys.argv[1:]
    make_builtins()
    if kind == "whole":
        return whole(*rest)
    sys.path.insert(0, FOLDER)
    import code_wire

    sys.path.remove(FOLDER)
    if kind == "calls":
        calls(code_wire, rest[0], rest[1:])
    else:
        serve(code_wire, rest)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
