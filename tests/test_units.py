"""Figures as people read them: next to nothing has no sign of its own."""

from __future__ import annotations

import pytest

from sac_search import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_percent(-1e-9), "+0.0%"),
        (units.format_percent(-0.0006), "-0.1%"),
        (units.format_seconds(-1e-9), "0.0 ms"),
        (units.format_mib(-100), "0.0 MiB"),
        (units.format_gib(-100), "0.000 GiB"),
        (units.format_gib(-12 * units.GIB), "-12.00 GiB"),
    ],
)
def test_what_rounds_to_nothing_is_not_negative(text: str, expected: str) -> None:
    assert text == expected
