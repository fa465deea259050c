"""What of libraries a step of a framework can run, found by the names in its code; and copies of functions."""

import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache, partial, update_wrapper
from operator import itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

FOLLOWED = ("torch.distributions", "torch.nn", "torch.optim")
"""Whose functions are looked into as the framework's are: those in Python that call others by their names."""
CONSTRUCTORS = ("__init__", "__new__")
MADE = ("namedtuple_", "_cython_", "pybind11_")  # modules that compilers and Python make up
HEAP = 1 << 9  # the flag of classes whose attributes can be set


class Reach:
    """All functions of libraries that some functions can call, and where they are looked up.

    Code says which global variables and attributes it reads. What may run is what modules and classes have of these
    names; functions of the framework are looked into in turn. Classes of nobody's packages are left out.

    Args:
        functions: Those of the framework.
        kinds: Classes of objects whose methods they may call.
        packages: The framework's.
        libraries: Packages whose functions are nobody's own.
        closed: Further classes, whose methods are not looked into beyond the functions, which may be of these.
    """

    def __init__(
        self, functions: Iterable[Any], kinds: Iterable[type], packages: Any, libraries: Any, closed: Any = ()
    ) -> None:
        """Look for them."""
        self.followed, self.known = tuple(f"{x}." for x in (*packages, *FOLLOWED)), {*packages, *libraries}
        self.places: dict[int, tuple[str, Any, dict[str, Any]]] = {}  # names, dictionaries, what counts of these
        self.kinds: dict[type, Any] = {}
        self.made: set[type] = set()  # those of which code can make objects
        self.waiting = [y for x in functions for y in list_functions(x)]
        self.names = {"forward": None} | dict.fromkeys(x.__name__ for x in self.waiting if closed)  # that code reads
        methods = (x for kind in self.add_kinds(closed) for x in vars(kind).values())
        self.seen = {*self.waiting, *(y for x in methods for y in list_functions(x))}
        self.add_kinds(kinds)
        while self.waiting:
            for function in self.waiting:
                self.look_into(function)
            self.waiting.clear()
            for kind, own in [*self.kinds.items()]:
                read = [x for x in own if x in self.names or x[:2] == "__"]  # calls, operators
                self.add(kind.__name__, own, [x for x in read if kind in self.made or x not in CONSTRUCTORS])
        rows = [(own, place) for _, place, own in self.places.values() if own]
        self.getters = [(itemgetter(*own, next(iter(own))), place) for own, place in rows]  # of one, a tuple, too
        self.found = self.read()
        del self.kinds, self.made, self.seen

    def read(self) -> tuple[list[Any], list[int]]:
        """What is there, and how many attributes each class and module has."""
        return [get(place) for get, place in self.getters], [len(place) for _, place in self.getters]

    def holds(self) -> bool:
        """Whether all of it is as it was."""
        try:
            return self.read() == self.found
        except KeyError:
            return False

    def look_into(self, function: FunctionType) -> None:
        """Note what a function's code names."""
        names, scopes = list_names(function.__code__), [function.__globals__]
        self.names |= dict.fromkeys(names)
        for scope in scopes:
            mine = [x for x in names if x in scope]
            modules = [vars(scope[x]) for x in mine if isinstance(scope[x], ModuleType)]
            scopes += [x for x in modules if all(x is not known for known in scopes)]
            self.made |= self.add_kinds(scope[x] for x in mine if isinstance(scope[x], type))
            self.add(scope["__name__"], scope, mine)

    def add_kinds(self, kinds: Iterable[type]) -> Any:
        """Note classes of libraries, and those that they derive from; return these."""
        bases = [y for x in kinds for y in (*x.__mro__, *type.mro(type(x))) if y.__flags__ & HEAP]
        found = {x: vars(x) for x in bases if str(x.__module__).partition(".")[0] in self.known}
        self.kinds |= found
        return found.keys()

    def add(self, name: str, place: Any, keys: Iterable[str]) -> None:
        """Note what is looked up there, and follow functions of the framework."""
        _, _, own = self.places.setdefault(id(place), (name, place, {}))
        for key in keys:
            x = place[key]
            self.add_kinds(map(type, x.values() if isinstance(x, dict) else [x]))
            if key not in own and not isinstance(x, type | ModuleType) and (callable(x) or hasattr(type(x), "__get__")):
                own[key] = x
                new = [y for y in list_functions(x) if y not in self.seen]
                self.waiting += [y for y in new if f"{y.__globals__.get('__name__')}.".startswith(self.followed)]
                self.seen |= {*new}


def list_functions(x: Any) -> Iterator[FunctionType]:
    """The functions that an attribute is made of: what decorators made, then what they were given."""
    while x is not None:
        if not isinstance(x, FunctionType):
            x = x.fget if isinstance(x, property) else x.func if isinstance(x, cached_property | partial) else x
            x = x.__func__ if isinstance(x, classmethod | staticmethod | MethodType) else x
        if isinstance(x, FunctionType):
            yield x
        x = getattr(x, "__dict__", {}).get("__wrapped__")


def list_names(code: CodeType) -> list[str]:
    """The names of variables of modules and of attributes that a function's code has."""
    return [*code.co_names, *(name for x in code.co_consts if isinstance(x, CodeType) for name in list_names(x))]


@lru_cache(maxsize=256)
def list_read(
    kind: type, functions: tuple[Any, ...], packages: tuple[str, ...], without: tuple[str, ...] = ()
) -> list[str]:
    """What the functions of `list_called` read."""
    called = list_called(kind, functions, packages, without)
    return [*dict.fromkeys(name for x in called for name in list_names(x.__code__))]


def list_called(
    kind: type, functions: tuple[Any, ...], packages: tuple[str, ...], without: tuple[str, ...] = ()
) -> tuple[FunctionType, ...]:
    """Functions, and in turn the methods of a framework that they call of a class, without some by name."""
    found = [y for x in functions for y in list_functions(x)]
    for function in found:
        names = [x for x in list_names(function.__code__) if x not in without]
        methods = [vars(x)[name] for name in names for x in kind.__mro__ if name in vars(x)]
        known = (y for x in methods for y in list_functions(x) if is_written_in(packages, y))
        found += dict.fromkeys(x for x in known if x not in found)
    return tuple(found)


def is_written_in(packages: tuple[str, ...], attribute: Any, *modules: str) -> bool:
    """Whether all functions that an attribute of a class is made of, and these modules, are of these packages."""
    return are_in(packages, (*modules, *(list_homes(attribute) or [""])))


@lru_cache(maxsize=256)
def are_in(packages: tuple[str, ...], modules: tuple[str, ...]) -> bool:
    """Whether all of some modules are of these packages."""
    return all(any(f"{module}.".startswith(f"{package}.") for package in packages) for module in modules)


def locate(x: Any) -> str:
    """Where a function was written, in brackets; nothing if it is not in Python."""
    return next((f" ({y.__code__.co_filename}:{y.__code__.co_firstlineno})" for y in list_functions(x)), "")


def list_homes(attribute: Any) -> list[str]:
    """The modules where the functions were written that an attribute of a class is made of."""
    return [str(x.__globals__.get("__name__")) for x in list_functions(attribute)]


def has_line(place: str, *parts: str) -> bool:
    """Whether a line of a module's source begins with one text, and has the others."""
    lines = linecache.getlines(str(getattr(sys.modules.get(place), "__file__", "")))
    return any(line.startswith(parts[0]) and all(x in line for x in parts) for line in lines)


def is_made_as(key: str, x: Any) -> bool:
    """Whether the module of a partial function's function has it under this name, in its source too."""
    home = x.func.__module__
    return getattr(sys.modules.get(home), key, None) is x and has_line(home, f"{key} = ", "partial(")


def is_made_for(place: str, key: str, x: Any, home: str) -> bool:
    """Whether a function that another one has made is in a class of the module where both were written."""
    kind = getattr(sys.modules.get(home), place, None)
    return "<locals>" in getattr(x, "__qualname__", "") and getattr(kind, "__dict__", {}).get(key) is x


def describe_foreign(place: str, key: str, x: Any, known: set[str]) -> str:
    """What is said of a function that is not a library's, or has another name than it is found by; else nothing.

    What is found in the module where it was written, under its name, is nobody's replacement, whosever module it is.
    """
    functions = [*list_functions(x)]
    homes = list_homes(x) or [type(x).__module__]
    is_known = all(home == place or home.partition(".")[0] in known or home.startswith(MADE) for home in homes)
    has_name = key == "forward" or key[:2] == "__" or any(y.__name__ in (key, f"_{key}", "<lambda>") for y in functions)
    has_name = has_name or is_made_for(place, key, x, homes[-1])
    imported = (y for y in functions if has_line(place, "", f"{y.__name__} as {key}"))
    if is_known and (is_made_as(key, x) if isinstance(x, partial) else has_name or not functions or any(imported)):
        return ""
    return f"{place}.{key} is {homes[-1]}.{getattr(x, '__qualname__', type(x).__name__)}{locate(x)}"


def find_override(thing: Any, names: Iterable[str], packages: tuple[str, ...], behind: type | None = None) -> str:
    """Find a method or property of an object, or a class, that is not the framework's, and say which; else nothing.

    An adapter goes around these names, of which the object may lack some. Packages may be modules, also those of
    decorators. Where a class of ours overrides the methods, those behind it count, as `super` finds them, if any are.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    bases = kind.__mro__[kind.__mro__.index(behind) + 1 if behind in kind.__mro__ else 0 :]
    own = getattr(thing, "__dict__", {}) if kind is not thing and behind is None else {}
    for name in names:
        if name in own:
            return f"this {kind.__name__} has its own {name}{locate(own[name])}"
        owner = next((x for x in bases if name in vars(x)), None)
        if owner is not None and not is_written_in(packages, vars(owner)[name], owner.__module__):
            return f"{owner.__name__} has its own {name}{locate(vars(owner)[name])}"
    return ""


# -- copies of a framework's functions in which some names mean other objects: nothing of the framework is patched -----


def copy_function(function: Any, names: Mapping[str, Any], closure: tuple[Any, ...] | None = None) -> FunctionType:
    """Copy a function so that some of the global names it reads mean other objects, and perhaps with other cells."""
    scope = {**function.__globals__, **names} if names else function.__globals__
    cells = function.__closure__ if closure is None else closure
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(copy, function)
    return copy
