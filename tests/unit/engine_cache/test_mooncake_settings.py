import pytest

from engine_cache.settings import MooncakeSettings


def test_the_environment_states_where_the_store_is(monkeypatch):
    monkeypatch.setenv("MOONCAKE_MASTER", "[fd00::1]:50051")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "0")
    settings = MooncakeSettings()
    assert (settings.mooncake_master, settings.mooncake_segment_bytes) == ("[fd00::1]:50051", 0)
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "4gb")
    assert MooncakeSettings().mooncake_segment_bytes == 4 * 2**30


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MOONCAKE_MASTER", "host"),
        ("MOONCAKE_MASTER", "host:0"),
        ("MOONCAKE_MASTER", "host:65536"),
        ("MOONCAKE_MASTER", "etcd://host:1"),
        ("MOONCAKE_PROTOCOL", "carrier pigeon"),
        ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "-1"),
    ],
)
def test_a_bad_value_names_its_variable(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}: got '{value}'"):
        MooncakeSettings()
