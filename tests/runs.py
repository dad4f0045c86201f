"""Runs for tests."""

from scalesteer.app.config import USUAL, Run, make_run


def changed(run: Run, **settings) -> Run:
    """The same run with other settings."""
    return make_run(**{**run.settings, **settings})


def flat(run: Run) -> dict:
    """All settings of a run by name; None for those that images or network decide, and for no channels."""
    return {**USUAL, **run.settings, "channels": run.network.channels or None}
