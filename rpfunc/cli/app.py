"""The command line: `rpfunc train`, `rpfunc sample` and `rpfunc simulate`."""

from __future__ import annotations

import io
import os
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated

from cyclopts import App, ArgumentCollection, CycloptsError, Parameter
from cyclopts.config import Dict
from rich.console import Console

from rpfunc import random
from rpfunc.cli.checks import PICTURES, check_numbers, check_outputs
from rpfunc.cli.roofline import RooflineOptions, roofline_command
from rpfunc.cli.simulate import SimulateOptions, simulate_command
from rpfunc.cli.train import INTERRUPTED, print_text, read_model, resume_run, train_run, write_text
from rpfunc.errors import MemoryLimitError, OptionsError, RpfuncError
from rpfunc.train import checkpoint
from rpfunc.train.options import TrainOptions

BAD_INPUT = 2
"""Exit code for options, files or folders that cannot work."""

TOO_MUCH = ("can't allocate memory", "out of memory", "can't start new thread")
"""How torch and Python say that a machine is too small."""


def build_app(console: Console, config: Sequence[Dict] = (), loaded: Sequence[Path] = ()) -> App:
    """Returns the commands; `config`, from the files `loaded`, gives `train`'s options, below the flags."""
    given: dict[tuple[str, ...], str] = {}

    def note_given(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        del app, commands
        given.update({argument.keys: argument.name for argument in arguments if argument.tokens and argument.keys})

    app = App(
        name="rpfunc",
        help="Pipeline schedules and exact streamed gradients for pure PyTorch functions.",
        suppress_keyboard_interrupt=False,  # `main` says so
    )

    @app.command(config=[*config, note_given])
    def train(
        config: Path | None = None,
        /,
        *,
        out: Path | None = None,
        resume: Path | None = None,
        options: Annotated[TrainOptions, Parameter(name="*")] = TrainOptions(),  # noqa: B008  (frozen)
    ) -> int:
        """Train a decoder of bytes, or a pretrained model, on a text file.

        Parameters
        ----------
        config
            TOML file of options; flags win over it.
        out
            Folder for the run; it must not exist. Default: runs/ and the name of the config, with -2, -3 ... if taken.
        resume
            Folder of a run to continue from its last checkpoint, with its own options; others are refused.
        """
        if config is not None and config not in loaded:
            raise OptionsError(
                f"config: {config} must be a .toml file and come first, as in `rpfunc train {config.stem}.toml`"
            )
        check_numbers(options)
        if resume is None:
            return train_run(console, options, config, out)
        if out is not None:
            raise OptionsError(f"resume: out is {out}, but a run goes on in its own folder, {resume}: leave out --out")
        return resume_run(console, resume, options, config, given)

    @app.command(name="sample")
    def write(run: Path, /, *, prompt: str = "And ", length: int = 300, temperature: float = 0.8, seed: int = 0) -> int:
        """Write text with the last checkpoint of a run.

        Parameters
        ----------
        run
            Folder of the run.
        prompt
            Text to go on from.
        length
            Tokens to write; a model of bytes writes one a token.
        temperature
            0 takes the likeliest token, 1 draws from the model's own distribution.
        seed
            Of the draws.
        """
        check_numbers(length, "length")
        check_numbers(seed, "seed")
        setting, folder = read_model(run)
        state = checkpoint.load(folder.checkpoint, setting.initial_state(), frozen=setting.start.frozen)
        start = setting.start.encode(prompt.encode(errors="surrogateescape"))
        key = random.key(seed)
        print_text(console, write_text(setting, state.params, start, length, temperature=temperature, key=key))
        return 0

    @app.command
    def simulate(
        *,
        options: Annotated[SimulateOptions, Parameter(name="*")] = SimulateOptions(),  # noqa: B008  (frozen)
        plot: Path | None = None,
        trace: Path | None = None,
        as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    ) -> int:
        """Compare schedules of a known decoder on known hardware, by simulation.

        Parameters
        ----------
        plot
            PNG or SVG file for the timeline; with several schedules, one each with its name added.
        trace
            Chrome trace JSON for the timeline, likewise.
        as_json
            Print one JSON object instead of the table.
        """
        check_numbers(options)
        check_outputs({"plot": (plot, PICTURES), "trace": (trace, (".json",))})
        return simulate_command(console, options, plot, trace, as_json)

    @app.command
    def roofline(
        *,
        options: Annotated[RooflineOptions, Parameter(name="*")] = RooflineOptions(),  # noqa: B008  (frozen)
        as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    ) -> int:
        """Tell from which microbatch on transfers hide behind computation.

        Parameters
        ----------
        as_json
            Print one JSON object instead of the table.
        """
        check_numbers(options)
        return roofline_command(console, options, as_json)

    return app


def read_config(path: Path) -> Dict:
    """Returns the options in a TOML file. Raises OptionsError if it is missing, no TOML, or has an unknown section."""
    try:
        options = tomllib.loads(path.read_text())
    except OSError as error:
        raise OptionsError(f"config: cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise OptionsError(f"config: {path} is no TOML file: {error}") from error
    known = [field.name for field in fields(TrainOptions)]
    unknown = [f"{name!r} is no option, there are {', '.join(known)}" for name in options if name not in known]
    if unknown:
        raise OptionsError.listing(f"config {path}", unknown)
    return Dict(options, use_commands_as_keys=False, source=str(path))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 2 for bad input in one clear message, 130 after Ctrl-C."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model may write any letter, a terminal may know few
    console, errors = Console(), Console(stderr=True)
    # The config file is an argument of `train`, and its values are defaults of the other arguments.
    files = [Path(token) for token in tokens[1:2] if token.endswith(".toml")]
    try:
        app = build_app(console, [read_config(path) for path in files], files)
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        if sys.stdout is not None:  # none: closed before the start
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except MemoryLimitError as error:
        return _refuse(errors, str(error).replace("memory_bytes", "--worker-memory"))  # as it is called here
    except (RpfuncError, CycloptsError) as error:
        return _refuse(errors, str(error))
    except OSError as error:  # a disk that is full, a file that may not be written
        return _refuse(errors, f"{error.filename or 'output'}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in TOO_MUCH):
            raise
        return _refuse(errors, f"this machine has too little for that: {str(error) or 'out of memory'}")
    except KeyboardInterrupt:
        errors.print("rpfunc: interrupted")
        return INTERRUPTED


def _refuse(errors: Console, message: str) -> int:
    """Prints one message, and sees to it that Python's own flush of the output at exit does not fail as well."""
    with suppress(OSError):
        errors.print(f"rpfunc: {message}", markup=False, highlight=False, soft_wrap=True)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return BAD_INPUT
