"""The number of random cases of a property test: a part of them by default, all of them with `pytest --soak`."""

from hypothesis import HealthCheck, settings

SHORT, SOAK = "kvsight", "soak"
"""Profiles of hypothesis. `max_examples` is also the percentage that `num_examples` returns."""


def register_profiles() -> None:
    """Register the profiles. Examples have no deadline: on a busy machine only the limit of the whole test matters."""
    for name, max_examples in ((SHORT, 25), (SOAK, 100)):
        checks = [HealthCheck.too_slow]
        settings.register_profile(name, max_examples=max_examples, deadline=None, suppress_health_check=checks)
    settings.load_profile(SHORT)


def num_examples(in_a_soak: int) -> int:
    """Number of examples of a test that runs `in_a_soak` of them in a soak. At least 3."""
    return max(3, in_a_soak * settings().max_examples // 100)
