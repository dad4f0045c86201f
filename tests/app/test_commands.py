"""The frame of the command line: lists of commands, flags of a configuration in groups."""

import re
import shlex
from dataclasses import dataclass, field

import pytest
import torch

from scalesteer.app import cli, make_run
from scalesteer.app.commands import Commands, OmitArgPrefixes, given, number_lists
from scalesteer.app.config import USUAL


@dataclass(frozen=True)
class Dough:
    """What goes in."""

    flour: int = 500  # In grams.
    eggs: tuple[int, ...] | None = None
    """How many, by size;
    by default none."""
    sweet: bool = False  # With sugar.


@dataclass(frozen=True)
class Rest:
    """What else."""

    name: str | None = None  # What it is called.
    oven: tuple[float, float] | None = None  # From and to.


PLACES = ("device", "data-dir", "runs", "network", "tensorboard")
kitchen = Commands("Cook.")
tools = kitchen.group("tools", "Clean and sharpen.")


@kitchen.command("bake", {"oven": "LOW HIGH", "name": "NAME"})
@dataclass(frozen=True)
class Bake:
    """Bake a cake
    and cool it.

    It takes an hour.
    """

    dough: OmitArgPrefixes[Dough] = field(default_factory=Dough)
    rest: OmitArgPrefixes[Rest] = field(default_factory=Rest)

    def run(self):
        if self.dough.flour <= 0:
            raise ValueError(f"`flour` must be positive (got {self.dough.flour}).")
        print({**given(self.dough), **given(self.rest)})


@tools.command("clean")
@dataclass(frozen=True)
class Clean:
    """Clean all.

    Also the oven.
    """

    def run(self):
        raise FileNotFoundError(2, "No such file or directory", "brush")


def shown(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        kitchen.main(words, "kitchen")
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_list_of_commands_has_one_sentence_for_each(capsys):
    text = shown(capsys, "--help")
    assert "Cook." in text
    assert "Bake a cake and cool it." in text
    assert "Clean and sharpen." in text
    assert "hour" not in text


def test_a_command_that_is_named_says_everything(capsys):
    assert "It takes an hour." in shown(capsys, "bake", "--help")
    assert "Also the oven." not in shown(capsys, "tools", "--help")
    assert "Also the oven." in shown(capsys, "tools", "clean", "--help")


def test_flags_are_shown_in_groups_with_comments_and_placeholders(capsys):
    text = shown(capsys, "bake", "--help")
    dough, rest = text.split("rest options")
    assert "What goes in." in dough
    assert "--flour INT In grams. (default: 500)" in dough
    assert "--eggs INT... How many, by size; by default none." in dough
    assert "--sweet With sugar." in dough
    assert "--name NAME What it is called." in rest
    assert "--oven LOW HIGH From and to." in rest
    assert "None" not in text
    assert "--no-sweet" not in text


def test_flags_become_the_configuration(capsys):
    words = "bake --eggs 1 2 --sweet --oven 150 180"
    assert kitchen.main(shlex.split(words)) == 0
    assert capsys.readouterr().out == f"{ {'eggs': (1, 2), 'sweet': True, 'oven': (150.0, 180.0)} }\n"


@pytest.mark.parametrize(
    ("words", "cake"),
    [
        ("--eggs 1,2 --oven 150,180", {"eggs": (1, 2), "oven": (150.0, 180.0)}),
        ("--eggs 1, 2 ,3", {"eggs": (1, 2, 3)}),
        ("--eggs=1,2 --oven=150,1.8e2", {"eggs": (1, 2), "oven": (150.0, 180.0)}),
        ("--eggs 1 --name 1,2", {"eggs": (1,), "name": "1,2"}),
        ("--oven 150,180 --name 1,2,", {"name": "1,2,", "oven": (150.0, 180.0)}),
        ("--eggs none", {"eggs": ()}),
    ],
)
def test_lists_of_numbers_have_spaces_or_commas(capsys, words, cake):
    assert kitchen.main(["bake", *words.split()]) == 0
    assert capsys.readouterr().out == f"{cake}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--flour ten", "--flour: it must be an integer, as 20 (got 'ten')"),
        ("--flour 1.5", "--flour: it must be an integer, as 20 (got '1.5')"),
        ("--flour 1,2", "--flour: it must be an integer, as 20 (got '1,2')"),
        ("--eggs 1 two", "--eggs: it must be integers, as 3 5 7"),
        ("--oven none 3", "--oven: it must be numbers, as 0.5 1 2"),
        ("--oven 150", "--oven"),
    ],
)
def test_what_is_no_number_is_told_with_what_is_wanted(capsys, monkeypatch, words, message):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        kitchen.main(["bake", *words.split()], "kitchen")
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert "literal" not in err


def test_what_a_configuration_or_the_disk_refuses_is_one_line(capsys):
    assert kitchen.main(["bake", "--flour", "0"]) == 2
    assert capsys.readouterr().err == "scalesteer: `flour` must be positive (got 0).\n"
    assert kitchen.main(["tools", "clean"]) == 2
    assert capsys.readouterr().err == "scalesteer: brush: No such file or directory\n"


def test_memory_that_does_not_suffice_is_one_line_and_what_is_unknown_is_raised(capsys, monkeypatch):
    monkeypatch.setattr(Clean, "run", lambda self: torch.empty(1 << 50))
    assert kitchen.main(["tools", "clean"]) == 2
    assert capsys.readouterr().err == "scalesteer: out of memory\n"
    monkeypatch.setattr(Clean, "run", lambda self: torch.ones(2, 3) @ torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        kitchen.main(["tools", "clean"])


def test_train_shows_each_setting_of_a_run_once(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    shown = re.findall(r"^\W*--(\w[\w-]*)", capsys.readouterr().out, re.M)
    assert sorted(shown) == sorted([*(name.replace("_", "-") for name in USUAL), *PLACES])
    assert number_lists(cli.Train) == {
        "--image-size", "--channels", "--test-channels", "--widths", "--kernel-size", "--resize", "--scale-range",
        "--sizes", "--train-sizes", "--test-sizes", "--scales", "--orders", "--value-range",
        "--planes", "--percentiles",
    }  # fmt: skip
    assert set(cli.PLACEHOLDERS) <= set(USUAL)
    assert cli.app.parse(["train"]).made == make_run()
