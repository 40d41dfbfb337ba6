import pytest

from ucp_core.numerics import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("17", 17), ("17B", 17), ("1.5 GiB", 3 << 29), ("2GB", 2 * 10**9), (" 3KiB ", 3072)],
)
def test_a_size_is_a_number_and_a_unit(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "3 bananas", "-1MiB", "1e3", "MiB"])
def test_anything_else_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: give a number and one of B, KiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_people_read_a_number_below_1024_and_a_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
