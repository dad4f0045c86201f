"""The frame of a command line: how commands are listed, how the flags of a configuration are shown, how all end."""

import ast
import inspect
import logging
import os
import re
import signal
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

try:
    from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg
    from tyro.extras import SubcommandApp
except ImportError:
    print("scalesteer: the command line needs tyro: pip install 'scalesteer[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

from scalesteer import __version__
from scalesteer.training.distributed import started
from scalesteer.training.predict import printable

__all__ = ["Commands", "FlagGroup", "Positional", "arg", "collect", "grouped_flags"]

log = logging.getLogger("scalesteer")
Kind = TypeVar("Kind", bound=type)
Config = TypeVar("Config")


class Commands:
    """Commands by name: frozen dataclasses whose fields are the flags and whose `run()` does the work, or groups.

    A list of commands shows the first sentence of each; `COMMAND --help` shows all that its docstring says.
    """

    def __init__(self, about: str = "") -> None:
        self.about, self.known = about, dict[str, Any]()

    def command(self, name: str) -> Callable[[Kind], Kind]:
        """Add a command; to decorate its class with."""

        def add(kind: Kind) -> Kind:
            self.known[name] = kind
            return kind

        return add

    def group(self, name: str, about: str) -> "Commands":
        """Add a command that has commands of its own."""
        self.known[name] = group = Commands(about)
        return group

    def parse(self, words: Sequence[str], prog: str | None = None) -> Any:
        """The command that these words are, with its flags; ends the program with what is wrong, or with help."""
        return self._shown_for(words).cli(prog=prog, description=self.about or None, args=list(words))

    def main(self, argv: Sequence[str] | None = None, prog: str = "scalesteer") -> int:
        """Run a command: 0 if all went well, 2 with one line on what is wrong, 130 or 143 when stopped."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the caller
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
            getattr(sys, name).reconfigure(errors="replace")  # the terminal may know few characters
        logging.basicConfig(format="scalesteer: %(message)s")
        log.setLevel(logging.ERROR if started().rank else logging.INFO)  # of several processes one speaks
        words = sys.argv[1:] if argv is None else argv
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            try:
                if list(words) == ["--version"]:
                    print(f"scalesteer {__version__}")
                    return 0
                self.parse(words, prog).run()
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            print("scalesteer: interrupted; repeat the command to go on.", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader has gone, as with `| head`: nothing is left to say, nor to flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (ValueError, TypeError, ImportError, OSError, MemoryError) as error:
            said = str(error)
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
                first = None if name == named else re.split(r"(?<=\.)\s", " ".join(kind.__doc__.split()))[0]
                app.command(name=name, help=first)(kind)
        return app


class FlagGroup(NamedTuple):
    """Flags that are shown together, and what they are about."""

    about: str
    names: tuple[str, ...]


def grouped_flags(config: type, groups: Mapping[str, FlagGroup], placeholders: Mapping[str, str]) -> Any:
    """A dataclass for the command line that shows the fields of a configuration in groups; see :func:`collect`.

    Args:
        config: A dataclass; a comment behind each field, or a docstring below it, is the help of its flag.
        groups: By title; each field is in one.
        placeholders: What stands for the value of a flag, by field, where the type does not say enough.
    """
    said, hints = _comments(config), get_type_hints(config)
    parts = []
    for title, group in groups.items():
        flags = []
        for name in group.names:
            default = getattr(config, name)
            told = default is None or default is False or "by default" in said[name].lower()
            hint = "" if told else f"(default: {default})"
            shown = arg(
                help=said[name], metavar=placeholders.get(name, _placeholder(hints[name])), help_behavior_hint=hint
            )
            flags.append((name, Annotated[hints[name], shown], field(default=default)))
        made = make_dataclass(title, flags, frozen=True)
        made.__doc__ = group.about
        parts.append((title, OmitArgPrefixes[FlagCreatePairsOff[made]], field(default=made())))  # type: ignore[misc, valid-type]
    return make_dataclass("Flags", parts, frozen=True)


def collect(config: type[Config], flags: Any) -> Config:
    """The configuration that grouped flags say."""
    groups = (getattr(flags, part.name) for part in fields(flags))
    return config(**{name: value for group in groups for name, value in vars(group).items()})


def _comments(config: type) -> dict[str, str]:
    """What the source of a dataclass says about each field, in a docstring below it or a comment behind it."""
    try:
        source = textwrap.dedent(inspect.getsource(config))
    except OSError:  # a package without its source has no help, but works
        return dict.fromkeys((part.name for part in fields(config)), "")
    lines, body = source.splitlines(), ast.parse(source).body[0].body  # type: ignore[attr-defined]
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            below = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = after.value.value if below else lines[(node.end_lineno or 0) - 1].partition("# ")[2]
            found[node.target.id] = " ".join(text.split())
    return found


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
