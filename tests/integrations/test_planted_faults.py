"""Every fault of tests/mutants/mutants.toml, planted in a copy of the tree: the tests named beside it must notice."""

import pytest

from tests.mutants.run import Mutant, check_sound, judge, load_mutants

MUTANTS = load_mutants()


def test_the_sound_tree_passes() -> None:
    """Or else a mutant would seem to be noticed by tests that fail anyway."""
    assert check_sound(MUTANTS) == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_noticed(mutant: Mutant) -> None:
    verdict = judge(mutant)
    assert verdict.outcome == "killed", f"{mutant.why} {mutant.tests} {verdict.by}"
