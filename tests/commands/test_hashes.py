"""`kvsight query --show-hashes` compared with published test vectors."""

from functools import partial
from pathlib import Path

import pytest

from tests.support.commands import invoke, printed

LOCAL = [0xCB38E4D7FB2DCA5C, 0xE8D3EC39B907B74C, 0x06B748F1777D599C, 0x01E03482F18B34E9]
ROLLING = [0xCB38E4D7FB2DCA5C, 0x44A2B2379D6D3C3D, 0xAEA1E67A6C80CF84, 0x1AAA5EB6E2524A3B]
TOKENS = ["--tokens", ",".join(map(str, range(1, 19)))]


hashes = partial(printed, "query", "--show-hashes")


def test_whole_pages_are_named_in_every_standard() -> None:
    found = hashes(*TOKENS, "--block-size", "4")
    assert found["local_hashes"] == LOCAL
    assert found["seq_hashes"] == ROLLING
    assert found["block_hashes"] == [value - 2**64 if value >= 2**63 else value for value in LOCAL]
    assert found["sglang"][:2] == [-3488128144981237669, 5674439469042975057]
    assert (found["seed"], found["num_tokens"], len(found["sglang_dynamo"])) == (1337, 18, 4)


@pytest.mark.parametrize(
    ("options", "page", "name"),
    [
        ("--seed 0", 1, 0x3A14937FD5340C7A),
        ("--seed dynamo", 1, ROLLING[1]),
        ("--lora ad", 0, 0xE31F2294523CAC4F),
        ("--salt x", 0, 0x32D40E0B05E9F0AE),
        ("--lora ad --salt x", 0, 0xA98797FCBCFD72B9),
        ("--lora= --salt=", 0, LOCAL[0]),
        ("--lora ad", 3, 0x3A2B86E7E7B7D2B2),
        ("--lora ad --salt x", 3, 0xF825316CBB67C828),
        ("--lora ad --seed 0", 3, 0x8FD665C3593C1DE2),
    ],
)
def test_the_seed_the_adapter_and_the_salt_enter_the_hashes(options: str, page: int, name: int) -> None:
    assert hashes(*TOKENS, "--block-size", "4", *options.split())["seq_hashes"][page] == name


@pytest.mark.parametrize(
    ("salt", "default", "dynamo"),
    [
        ("", [-3488128144981237669, 5674439469042975057], [-3488128144981237669, 5674439469042975057]),
        ("salt", [2420881443615746796, -3357511578400053793], [-5831485738128826871, 8146906705291831314]),
    ],
)
def test_sglangs_hashes_are_those_that_its_release_0_5_23_publishes(
    salt: str, default: list[int], dynamo: list[int]
) -> None:
    found = hashes("--tokens", "1,2,3,4,5,6,7,8", "--block-size", "4", "--salt", salt)
    assert (found["sglang"], found["sglang_dynamo"]) == (default, dynamo)


@pytest.mark.parametrize(("block_size", "pages"), [(4, "4 pages"), (16, "1 page")])
def test_people_read_how_many_pages_there_are(block_size: int, pages: str) -> None:
    shown = invoke("query", "--show-hashes", *TOKENS, "--block-size", block_size).stdout
    assert shown.startswith(f"{pages} of {block_size} tokens, seed 1337\n")


def test_pages_of_pairs_overlap_by_a_token() -> None:
    found = hashes("--tokens", "1 2 3 4 5 6 7 8 9", "--block-size", "4", "--eagle")
    assert found["local_hashes"] == [1914873892905420881, 1929047464662796003]


@pytest.mark.parametrize(
    "text", ["1 2 3 4\n", "1, 2,\n3 4", " [1, 2, 3, 4]", '{"model_name": "m", "token_ids": [1,2,3,4]}']
)
def test_a_prompt_may_come_from_a_file_or_stdin(text: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_text(text)
    for where, stdin in ((str(file), ""), ("-", text)):
        assert hashes("--tokens", f"@{where}", "--block-size", "4", stdin=stdin)["local_hashes"] == LOCAL[:1]


def test_the_body_of_a_query_names_its_adapter_and_salt() -> None:
    body = '{"model_name": "m", "token_ids": [1, 2, 3, 4], "lora_name": "ad", "cache_salt": "x"}'
    assert hashes("-", "--block-size", "4", stdin=body)["seq_hashes"] == [0xA98797FCBCFD72B9]


def test_the_table_shows_decimals_and_hex() -> None:
    table = invoke("query", "--show-hashes", *TOKENS, "--block-size", "4").stdout
    assert "44a2b2379d6d3c3d" in table
    assert str(0x44A2B2379D6D3C3D) in table
    short = invoke("query", "--show-hashes", "--tokens", "1,2,3", "--block-size", "4").stdout
    assert "3 tokens: less than one page of 4" in short
