"""Tables of many rows look as those of few."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dflash_ops import long_table, render

cells = st.one_of(st.none(), st.integers(), st.text("ab é\x1b", max_size=6))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example(rows=[(None, "a ", None)])
@given(rows=st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=4))
def test_it_is_the_table_that_rich_draws(rows: list[tuple[object, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    columns = ("NAME", "NUMBER", "NOTE")
    render.table(columns, rows, right=("NUMBER",), spare=("NOTE",))
    expected = capsys.readouterr().out
    if not long_table._drawn(columns, rows, {"NUMBER"}, ("NOTE",)):
        assert any(not str(cell).isascii() or str(cell)[-1:] == " " for row in rows for cell in row)
        return
    assert capsys.readouterr().out == expected


def test_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Spare columns go first; what still does not fit is left to rich, which folds it."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rows = [("a" * 20, "b" * 20)] * 2
    for width, shown in (("45", "b"), ("44", "a"), ("22", "a")):
        monkeypatch.setenv("COLUMNS", width)
        assert long_table._drawn(("NAME", "MORE"), rows, set(), ("MORE",))
        out = capsys.readouterr().out
        assert shown in out and (shown == "b") == ("MORE" in out)
        assert {len(line) for line in out.split("\n")[:-1]} <= {22, 45}
    monkeypatch.setenv("COLUMNS", "21")
    assert not long_table._drawn(("NAME", "MORE"), rows, set(), ("MORE",))
