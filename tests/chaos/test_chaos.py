"""A short chaos run with a fixed seed. `make chaos` runs for as long as you like, and also judges times and lies, which
depend on the speed of the machine.
"""

from pathlib import Path

import pytest

import tests.chaos.log_faults
from tests.chaos.faults import FAULTS
from tests.chaos.report import plain_table
from tests.chaos.run import Outcome, run

pytestmark = pytest.mark.timing("views must be right within ten seconds of any fault")

assert tests.chaos.log_faults  # fills the table
_SEED, _INJECTIONS = 1, 6
_MINUTES = 0.45


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_view_equals_its_cache_after_any_fault(tmp_path: Path) -> None:
    told: list[Outcome] = []
    names = [name for name, fault in FAULTS.items() if fault.hold_s <= 3 and "burst" not in name]
    report = run(tmp_path, _SEED, _MINUTES, names, told.append, _INJECTIONS)
    assert told
    assert report.is_healed, "\n".join([plain_table([report]), *(line for each in told for line in each.details)])
