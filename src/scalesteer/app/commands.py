"""The frame of a command line: how commands are listed, how the flags of a configuration are shown, how all end."""

import inspect
import logging
import os
import re
import shutil
import signal
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

try:
    from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo
    from tyro.extras import SubcommandApp
except ImportError:
    print("scalesteer: the command line needs tyro: pip install 'scalesteer[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

from scalesteer import __version__
from scalesteer._text import nearest, printable, printable_lines

__all__ = ["Commands", "OmitArgPrefixes", "Positional", "arg", "given", "percent"]

log = logging.getLogger("scalesteer")
Kind = TypeVar("Kind", bound=type)


class PrintableFormatter(logging.Formatter):
    """Lines of a log for a terminal: names of files and folders in them may hold anything."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return printable_lines(super().formatException(ei))


class Commands:
    """Commands by name: frozen dataclasses whose fields are the flags and whose `run()` does the work, or groups.

    A list of commands shows the first sentence of each; `COMMAND --help` shows all that its docstring says. Help must
    come at once: modules with commands import what takes time, torch above all, in `run()`. `start` is called before a
    command runs.
    """

    def __init__(self, about: str = "", start: Callable[[], object] = lambda: None) -> None:
        self.about, self.start, self.known = about, start, dict[str, Any]()

    def command(self, name: str, placeholders: Mapping[str, str] | None = None) -> Callable[[Kind], Kind]:
        """Add a command; to decorate its class with. A field that is a dataclass is a group of flags, without prefix.

        `placeholders` are what stands for the value of a flag of a group, where the type does not say enough.
        """

        def add(kind: Kind) -> Kind:
            _prepare(kind, placeholders or {})
            self.known[name] = kind
            return kind

        return add

    def group(self, name: str, about: str) -> "Commands":
        """Add a command that has commands of its own."""
        self.known[name] = group = Commands(about)
        return group

    def parse(self, words: Sequence[str], prog: str | None = None) -> Any:
        """The command that these words are, with its flags; ends the program with what is wrong, or with help."""
        kind = self._named(words, prog or os.path.basename(sys.argv[0]))
        words = _split_numbers(words, () if kind is None else number_lists(kind))
        if kind is not None and {"-h", "--help"}.intersection(words):
            print(f"{_wrapped(kind.__doc__ or '')}\n")  # here, since tyro would join the lines
        app, about = self._shown_for(words), self.about or None
        return app.cli(prog=prog, description=about, args=words, config=(FlagCreatePairsOff,), registry=NUMBERS)

    def _named(self, words: Sequence[str], prog: str) -> type | None:
        """The command that the first words name, if they do; ends the program if there is none of that name."""
        if not words or words[0].startswith("-"):
            return None
        if words[0] not in self.known:
            near = nearest(words[0], tuple(self.known))
            hint = f" Did you mean {near!r}?" if near else ""
            listed = ", ".join(self.known)
            said = f"{prog}: there is no command {printable(words[0])!r}.{hint} The commands are {listed}."
            print(said, file=sys.stderr)
            raise SystemExit(2)
        kind: type | Commands = self.known[words[0]]
        return kind._named(words[1:], f"{prog} {words[0]}") if isinstance(kind, Commands) else kind

    def main(self, argv: Sequence[str] | None = None, prog: str = "scalesteer") -> int:
        """Run a command: 0 if all went well, 2 with one line on what is wrong, 130 or 143 when stopped."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the caller
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
            getattr(sys, name).reconfigure(errors="replace")  # the terminal may know few characters
        handler = logging.StreamHandler()
        handler.setFormatter(PrintableFormatter("scalesteer: %(message)s"))
        logging.basicConfig(handlers=[handler])
        words = sys.argv[1:] if argv is None else argv
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            try:
                if list(words) == ["--version"]:
                    print(f"scalesteer {__version__}")
                    return 0
                command = self.parse(words, prog)
                from scalesteer.app.distributed import started  # after parsing: it takes torch

                log.setLevel(logging.ERROR if started().rank else logging.INFO)  # of several processes one speaks
                self.start()
                command.run()
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            print("scalesteer: interrupted; repeat the command to go on.", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader has gone, as with `| head`: nothing is left to say, nor to flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (ValueError, TypeError, ImportError, OSError, MemoryError, RuntimeError) as error:
            said = str(error)
            if isinstance(error, RuntimeError):
                if "allocate memory" not in said and type(error).__name__ != "OutOfMemoryError":
                    raise
                said = ""  # the CPU's allocator has no exception of its own, and torch's message is for its developers
            if isinstance(error, OSError) and error.filename is not None:
                said = f"{error.filename}: {error.strerror}"  # without the error's number
            print(f"scalesteer: {printable(' '.join(said.split())) or 'out of memory'}", file=sys.stderr)
            return 2
        finally:
            signal.signal(signal.SIGTERM, before)
        return 0

    def _shown_for(self, words: Sequence[str]) -> SubcommandApp:
        """The commands, where all but the one that is named say no more than a sentence."""
        app, named = SubcommandApp(), words[0] if words else ""
        for name, kind in self.known.items():
            if isinstance(kind, Commands):
                app.command(kind._shown_for(words[1:] if name == named else ()), name=name, help=kind.about)
            else:
                said = "" if name == named else re.split(r"(?<=\.)\s", _joined(kind.__doc__))[0]
                app.command(name=name, help=said)(kind if name == named else _Unnamed)
        return app


@dataclass(frozen=True)
class _Unnamed:
    """In the place of commands that are only listed: their flags need not be understood."""


def _joined(text: str) -> str:
    return " ".join(text.split())


def _wrapped(text: str) -> str:
    """A docstring's paragraphs, wrapped to the terminal's width; examples stay on one line, to be copied."""
    width = shutil.get_terminal_size().columns
    fill = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False).fill
    paragraphs = map(_joined, inspect.cleandoc(text).split("\n\n"))
    return "\n\n".join(part if part.startswith("Example:") else fill(part) for part in paragraphs)


def _prepare(kind: Any, placeholders: Mapping[str, str]) -> None:
    """Have the flags of a dataclass, and of those in it, shown as we like: no default that says nothing."""
    hints = get_type_hints(kind, include_extras=True)
    for part in fields(kind):
        plain = _plain(hints[part.name])
        if is_dataclass(plain):
            _prepare(plain, placeholders)
        elif _is_nothing(part.default):
            hint = _default_first(hints[part.name], part.default)
            hints[part.name] = Annotated[hint, arg(help_behavior_hint="")]
        if part.name in placeholders:
            hints[part.name] = Annotated[hints[part.name], arg(metavar=placeholders[part.name])]
    kind.__annotations__ = hints


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def given(group: Any) -> dict[str, Any]:
    """The flags of a group, and of the groups in it, that do not have their defaults, by name."""
    found = dict[str, Any]()
    for part in fields(group):
        value = getattr(group, part.name)
        found |= given(value) if is_dataclass(value) else {} if value == part.default else {part.name: value}
    return found


def percent(share: float) -> str:
    """A share, for a terminal."""
    return f"{100 * share:.2f} %"


def _is_nothing(default: Any) -> bool:
    """Whether a default is not worth showing; 0 is."""
    return default is None or default is False or default == ()


def _default_first(hint: Any, default: Any) -> Any:
    """A type of the same values that begins with the type of the default: tyro then loads no checker of types."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        return Annotated[_default_first(inner, default), *more]
    return Union[type(default), *_alternatives(hint)] if _is_nothing(default) and default is not False else hint


def _placeholder(hint: Any) -> str | None:
    """What stands for a value of a type: INT, FLOAT..., {a,b}; None for a switch, which has no value."""
    kinds = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return "|".join(filter(None, (_placeholder(kind) for kind in kinds if kind is not type(None))))
    if get_origin(hint) is Literal:
        return "{" + ",".join(kinds) + "}"
    if get_origin(hint) is tuple:
        return (
            f"{_placeholder(kinds[0])}..." if kinds[1] is ... else " ".join(_placeholder(kind) or "" for kind in kinds)
        )
    return None if hint is bool else {str: "NAME"}.get(hint, hint.__name__.upper())


# Numbers on the command line

NUMBERS = ConstructorRegistry()


@NUMBERS.primitive_rule
def _number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Reads integers, numbers and lists of them, also ones that may be missing; says in words what is wrong."""
    kinds = [kind for kind in _alternatives(info.type) if kind is not type(None)]
    lists = [kind for kind in kinds if _is_number_list(kind)]
    if not kinds or not all(kind in (int, float) or kind in lists for kind in kinds):
        return None
    number: type = next(iter(get_args(lists[0]) if lists else kinds))
    wanted = {int: "an integer, as 20", float: "a number, as 0.5"}[number]
    many = {int: "integers, as 3 5 7", float: "numbers, as 0.5 1 2"}[number]
    counts = {1 if kind not in lists else 0 if ... in get_args(kind) else len(get_args(kind)) for kind in kinds}
    nargs: Any = "*" if 0 in counts else max(counts)

    def read(words: list[str]) -> Any:
        if nargs == "*" and len(words) == 1 and words[0].lower() == "none" and type(None) in _alternatives(info.type):
            return ()
        values = []
        for word in words:
            try:
                values.append(number(word))
            except ValueError:
                rule = f"{many} (spaces or commas between them; anything else stands before the flag)"
                raise ValueError(f"it must be {rule if lists else wanted} (got {word!r})") from None
        return tuple(values) if lists and not (len(values) == 1 and 1 in counts) else values[0]

    return PrimitiveConstructorSpec(
        nargs=nargs,
        metavar=_placeholder(info.type) or "",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, (int, float, tuple, type(None))) and not isinstance(value, bool),
        str_from_instance=lambda value: [*map(str, value)] if isinstance(value, tuple) else [str(value)],
    )


def number_lists(kind: Any) -> set[str]:
    """The flags of a dataclass, and of those in it, whose values are several numbers."""
    found, hints = set[str](), get_type_hints(kind)
    for part in fields(kind):
        inner = hints[part.name]
        if is_dataclass(inner):
            found |= number_lists(inner)
        elif any(map(_is_number_list, _alternatives(inner))):
            found.add(f"--{part.name.replace('_', '-')}")
    return found


def _split_numbers(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """The words with commas taken for spaces in the numbers that follow these flags."""
    split, inside = list[str](), False
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            inside = name.replace("_", "-") in flags
            if inside and equals and "," in value:
                split += [name, *filter(None, value.split(","))]
                continue
        numbers = [part for part in word.split(",") if part]
        split += numbers if inside and all(map(_is_number, numbers)) else [word]
    return split


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_number_list(hint: Any) -> bool:
    kinds = set(get_args(hint)) - {...}
    return get_origin(hint) is tuple and len(kinds) == 1 and kinds <= {int, float}
