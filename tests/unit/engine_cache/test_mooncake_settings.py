import pytest

from engine_cache.settings import MooncakeSettings


def test_the_environment_states_where_the_store_is(monkeypatch):
    monkeypatch.setenv("KVSIGHT_MOONCAKE_MASTER", "[fd00::1]:50051")
    monkeypatch.setenv("KVSIGHT_MOONCAKE_SEGMENT_BYTES", "0")
    settings = MooncakeSettings()
    assert (settings.mooncake_master, settings.mooncake_segment_bytes) == ("[fd00::1]:50051", 0)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVSIGHT_MOONCAKE_MASTER", "host"),
        ("KVSIGHT_MOONCAKE_MASTER", "host:0"),
        ("KVSIGHT_MOONCAKE_MASTER", "host:65536"),
        ("KVSIGHT_MOONCAKE_MASTER", "etcd://host:1"),
        ("KVSIGHT_MOONCAKE_PROTOCOL", "carrier pigeon"),
        ("KVSIGHT_MOONCAKE_SEGMENT_BYTES", "-1"),
    ],
)
def test_a_bad_value_names_its_variable(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}: got '{value}'"):
        MooncakeSettings()
