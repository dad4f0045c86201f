"""The simulation of large sweeps, against what can be said without it."""

import itertools
import json
import math
import random

import pytest

from speed import simulation
from speed.simulation import BACK_S, NOTICE_S, START_S, Run, simulate


def never():
    return math.inf


@pytest.mark.parametrize(("count", "machines", "gpus_each"), [(7, 1, 1), (7, 2, 1), (64, 8, 8), (65, 8, 8), (3, 8, 8)])
def test_equal_runs_take_as_many_rounds_as_they_need(count, machines, gpus_each):
    found = simulate([Run(100.0, 3.0)] * count, machines, gpus_each, never)
    rounds = math.ceil(count / (machines * gpus_each))
    assert found.makespan == pytest.approx(rounds * (START_S + 100))
    assert found.utilisation == pytest.approx(count * 100 / (found.makespan * machines * gpus_each))
    assert (found.deaths, found.lost, found.most_restarts) == (0, 0, 0)


def test_death_costs_what_was_not_saved_and_the_time_to_notice_and_to_start_again():
    lives = iter([START_S + 47.0, math.inf, math.inf])  # of the first machine, the second, and the first again
    found = simulate([Run(100.0, 10.0), Run(500.0, 10.0)], 2, 1, lambda: next(lives))
    assert (found.deaths, found.most_restarts) == (1, 1)
    assert found.lost == pytest.approx(7)
    # The second machine is busy: the run goes on with 60 seconds left when the first one is back.
    assert found.makespan == pytest.approx(max(START_S + 500, START_S + 47 + max(BACK_S, NOTICE_S) + START_S + 60))


def test_machine_that_dies_while_its_run_starts_loses_nothing():
    lives = iter([START_S / 2, math.inf, math.inf])
    found = simulate([Run(100.0, 10.0)], 2, 1, lambda: next(lives))
    assert found.lost == 0
    assert found.makespan == pytest.approx(START_S / 2 + NOTICE_S + START_S + 100)  # on the other machine


def test_every_run_is_finished_once_whatever_dies():
    chance = random.Random(0)
    runs = [Run(chance.uniform(1, 400), chance.uniform(1, 60)) for _ in range(200)]
    deaths = [simulate(runs, 3, 2, lambda mean=mean: chance.expovariate(1 / mean)) for mean in (1e9, 2000, 500)]
    bound = max(sum(run.seconds + START_S for run in runs) / 6, max(run.seconds for run in runs) + START_S)
    assert all(found.makespan >= bound for found in deaths)
    assert all(a.makespan < b.makespan and a.lost <= b.lost for a, b in itertools.pairwise(deaths))
    assert [found.deaths > 0 for found in deaths] == [False, True, True]
    for found in deaths:  # what was useful, by the definition of utilisation, is all that was asked for
        assert found.utilisation * found.makespan * 6 == pytest.approx(sum(run.seconds for run in runs))


def test_stored_file_has_what_a_new_one_has(tmp_path):
    again = simulation.measure(tmp_path / "again.json")
    kept = json.loads(simulation.OUTPUT.read_text())
    assert kept["assumed"] == again["assumed"]
    assert [set(case) for case in kept["cases"]] == [set(case) for case in again["cases"]]


def test_page_says_what_was_assumed_and_shows_every_case():
    kept = json.loads(simulation.OUTPUT.read_text())
    assert simulation.sweep_numbers()["gpus"] == kept["assumed"]["machines"] * kept["assumed"]["gpus_each"]
    assert len(simulation.sweep_table().splitlines()) == 2 + len(kept["cases"]) / 2
