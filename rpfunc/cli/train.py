"""`rpfunc train`: from a TOML file and flags to a run folder."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from rpfunc import random
from rpfunc.cli.progress import show_progress
from rpfunc.errors import OptionsError
from rpfunc.model import Params
from rpfunc.runtime import State
from rpfunc.schedule import draw
from rpfunc.train.folder import RunFolder
from rpfunc.train.loop import DRAWN_STEPS, Outcome, Setting, prepare, restore, run
from rpfunc.train.options import TrainOptions
from rpfunc.train.plots import draw_loss
from rpfunc.train.sample import sample
from rpfunc.train.start import PACKAGE

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def train_run(console: Console, options: TrainOptions, config: Path | None, out: Path | None) -> int:
    """Starts a run; returns the exit code."""
    options = _absolute(options, config.parent if config else Path())
    setting = prepare(options)
    state = setting.initial_state()  # before anything is written: a model too large fails here
    folder = RunFolder(out or _free_folder(Path("runs"), config.stem if config else "run"))
    with folder.begin(options):
        console.print(f"writing to {folder.path}", highlight=False)
        return _run(console, setting, folder, state)


def resume_run(
    console: Console, path: Path, options: TrainOptions, config: Path | None, given: Mapping[tuple[str, ...], str]
) -> int:
    """Continues a run from its last checkpoint; returns the exit code.

    given  the options' names by their paths in `options`, of those that flags or a config set; ones that differ from
           the run's own are refused
    """
    folder = RunFolder(path)
    own = folder.read_options()
    _check_same(path, own, _absolute(options, config.parent if config else Path()), given)
    setting = prepare(own)
    state = restore(setting, folder)
    folder.rewind(state.step)
    console.print(f"continuing {folder.path} after step {state.step} of {setting.options.steps}", highlight=False)
    return _run(console, setting, folder, state)


def _check_same(path: Path, own: TrainOptions, other: TrainOptions, given: Mapping[tuple[str, ...], str]) -> None:
    pairs = {name: (_value(own, keys), _value(other, keys)) for keys, name in given.items()}
    problems = [f"{name} is {new!r}, the run has {old!r}" for name, (old, new) in pairs.items() if old != new]
    if problems:
        hint = "a run goes on with its own options; leave out what differs, or begin another run with --out"
        raise OptionsError.listing(f"resume {path}: {hint}", problems)


def _value(options: object, keys: Sequence[str]) -> object:
    for key in keys:
        options = getattr(options, key, None)  # none: of a section that is left out
    return options


def _absolute(options: TrainOptions, folder: Path) -> TrainOptions:
    """Returns the options with the files that they name, relative to a folder, by paths that stay right."""
    if options.data.text:
        options = replace(options, data=replace(options.data, text=str((folder / options.data.text).absolute())))
    if options.pretrained and not options.pretrained.startswith(PACKAGE):
        options = replace(options, pretrained=str((folder / options.pretrained).absolute()))
    return options


def _free_folder(parent: Path, stem: str) -> Path:
    """Returns parent/stem, or the first of parent/stem-2, -3 ... that does not exist."""
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(parent / name for name in names if not (parent / name).exists())


def _run(console: Console, setting: Setting, folder: RunFolder, state: State) -> int:
    options = setting.options
    with _interruptible() as stop, show_progress(console, state.step, options.steps) as report:
        outcome = run(setting, state, folder, report, stop)
    if outcome.interrupted:
        console.print(
            f"stopped after step {outcome.state.step}; the checkpoint is whole. "
            f"Continue with:\n  rpfunc train --resume {folder.path}",
            soft_wrap=True,
        )
        return INTERRUPTED
    _finish(console, setting, folder, outcome)
    return 0


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed; a second press interrupts at once, as usual."""
    pressed = threading.Event()

    def note(signum: int, frame: object) -> None:
        del signum, frame
        pressed.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


def _finish(console: Console, setting: Setting, folder: RunFolder, outcome: Outcome) -> None:
    options = setting.options
    steps = sorted(outcome.held_out)
    console.print(
        f"\nheld-out loss: {outcome.held_out[steps[0]]:.3f} bits per byte before, "
        f"[bold]{outcome.held_out[steps[-1]]:.3f}[/bold] after {steps[-1]} steps"
    )
    written_to = [folder.metrics, folder.checkpoint]
    if options.sample_tokens:
        written = write_text(
            setting, outcome.state.params, setting.text[: min(32, options.data.rows)].tolist(), options.sample_tokens
        )
        written_to.append(folder.path / "sample.txt")
        written_to[-1].write_bytes(written)
        console.print("\na sample:", style="bold")
        print_text(console, written)
    written_to += setting.start.export(outcome.state.params, folder.path)
    if outcome.timeline.events:
        trace = folder.path / "timeline.json"
        trace.write_text(outcome.timeline.chrome_trace())
        written_to.append(trace)
    written_to += _plots(console, folder, outcome)
    console.print("\nwrote:", style="bold")
    for path in written_to:
        console.print(f"  {path}", soft_wrap=True, highlight=False)


def write_text(
    setting: Setting,
    params: Params,
    prompt: Sequence[int],
    num: int,
    *,
    temperature: float = 0.8,
    key: random.Key | None = None,
) -> bytes:
    """Returns the prompt and `num` tokens that the model goes on with; None: a key of the run's own seed."""
    key = random.fold_in(random.key(setting.options.seed), "sample") if key is None else key
    rows, model = setting.options.data.rows, setting.start.model
    written = sample(model, params, prompt, num, rows=rows, key=key, temperature=temperature)
    return setting.start.decode([*prompt, *written])


def print_text(console: Console, text: bytes) -> None:
    """Prints bytes that a model wrote; what is no printable text shows as a replacement character."""
    decoded = text.decode(errors="replace")
    shown = "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in decoded
    )
    console.print(shown, markup=False, highlight=False, soft_wrap=True)


def _plots(console: Console, folder: RunFolder, outcome: Outcome) -> list[Path]:
    loss, timeline = folder.path / "loss.png", folder.path / "timeline.png"
    try:
        draw_loss(folder.records(), loss, f"{folder.path.name}: loss")
        if not outcome.timeline.events:
            return [loss]
        draw(outcome.timeline, timeline, f"{folder.path.name}: last {DRAWN_STEPS} steps")
    except ModuleNotFoundError as error:
        console.print(f"no plots: {error.name} is not installed (pip install 'rpfunc\\[plot]')")
        return []
    return [loss, timeline]


def read_model(path: Path) -> tuple[Setting, RunFolder]:
    """Returns a run's setting and folder. Raises OptionsError if there is no run in `path`."""
    folder = RunFolder(path)
    if not folder.path.is_dir():
        raise OptionsError(f"run {path}: there is no such folder")
    return prepare(folder.read_options()), folder
