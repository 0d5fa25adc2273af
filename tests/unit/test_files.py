"""Files are whole or as before, whatever fails."""

import pytest

from rpfunc.files import replace_file


class Failure(BaseException):
    """Not one that anybody knows."""


def half(path):
    path.write_text("ha")
    raise Failure


@pytest.mark.parametrize("name", ["plain", "table.json", "two.parts.json"])
def test_a_failure_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(Failure):
        replace_file(path, half)
    assert not list(tmp_path.iterdir())
    replace_file(path, lambda beside: beside.write_text("whole"))
    with pytest.raises(Failure):
        replace_file(path, half)
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_beside_has_the_same_suffix(tmp_path):
    seen = []

    def fill(beside):
        seen.append(beside)
        beside.write_text("")

    replace_file(tmp_path / "picture.png", fill)
    assert [(path.parent, path.suffix) for path in seen] == [(tmp_path, ".png")]


@pytest.mark.parametrize("there", [True, False])
def test_an_error_names_the_file_that_was_asked_for(tmp_path, there):
    """A folder has that name, or none holds it."""
    path = tmp_path / "folder" / "at"
    if there:
        path.mkdir(parents=True)
    with pytest.raises(OSError, match=str(path)):
        replace_file(path, lambda beside: beside.write_text(""))
    assert [*tmp_path.rglob("*")] == ([path.parent, path] if there else [])
