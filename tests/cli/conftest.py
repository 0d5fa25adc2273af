import pytest
from cli.tiny_runs import write_files

from rpfunc.cli import main


@pytest.fixture
def folder(tmp_path):
    write_files(tmp_path)
    return tmp_path


@pytest.fixture
def rpfunc(folder, monkeypatch, capsys):
    """Runs a command line in this process, in the folder; gives exit code, output and errors."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run
