"""A layer of one's own, checked: what its rows see, and that streaming it gives plain autograd's gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.checks import count_problems, is_real, shown
from rpfunc.errors import OptionsError
from rpfunc.model import Flat, Form, Layer
from rpfunc.stream import Attending, Bidirectional, Opaque, Recurrent, RowWise
from rpfunc.stream.flat import is_inexact
from rpfunc.sums import whole_sums
from rpfunc.testing.documents import foreign_document
from rpfunc.testing.oracles import assert_close, assert_untouched, gradient_error
from rpfunc.testing.sight import first_rows, knows_rows, offence, wide
from rpfunc.testing.ways import Cut, autograd, floats, prefix, ways

TOLERANCE = 1e-10


def assert_streams(
    layer: Layer | Form,
    params: Any,
    x: Any,
    batch: Batch,
    chunk: int | None = None,
    *,
    tolerance: float | None = None,
    seed: int = 0,
    draws: int = 16,
    segments: str | None = "segments",
) -> None:
    """Raises AssertionError, saying where and why, unless a layer can be cut as its form promises.

    layer, params, x, batch  as in a call of the layer, or of a form; at least 2 examples (groups) and 3 rows, more
                             than a window. All floats become float64
    chunk                    check one chunk size on the whole batch and nothing else
    tolerance                of `gradient_error`, below 1; None: 1e-10, or for a given `chunk` equal values, which only
                             arithmetic without rounding gives (`rpfunc.testing.exact`)
    draws                    how many cuts are drawn from `seed`: examples, rows (1, too), chunk, microbatches
    segments                 name of a row leaf (B, T): rows of different values are different documents and must not
                             see each other. None, or where the batch has no leaf "segments": there is no such rule

    In order: the layer writes into no argument, reads nothing but its arguments (two calls agree, the global random
    state stays), and gives finite numbers, of as many rows as there are; no output row depends on an input row that its
    form, window, segment or example forbids (whole and in chunks of 2 rows; the first few rows, and all rows of all
    documents; with other parameters in place of leaves of zeros, which would hide it); cut in any of the drawn ways,
    layer by layer (attention kept, too) and chunk by chunk, it gives the output of whole rows and the gradients of x
    and params by torch.autograd. Raises OptionsError for options that cannot work.
    """
    _check_options(layer, chunk, tolerance, draws)
    form, name = (layer.form, f"layer {layer.name!r}") if isinstance(layer, Layer) else (layer, _kind(layer))
    selected = layer.select(params) if isinstance(layer, Layer) else params
    if chunk is not None:
        _check_cut(name, form, selected, x, batch, Cut(chunk, 1), 0.0 if tolerance is None else tolerance, seed)
        return
    selected, x, batch = tree.map(_double, selected), tree.map(_double, x), batch.map(_double)
    if segments == "segments" and segments not in batch.row:
        segments = None
    _check_enough(name, form, batch, segments)
    _check_call(name, form, selected, x, batch)
    _check_sight(name, form, selected, x, batch, segments, seed)
    for cut_x, cut_batch, cut in _draw(form, x, batch, draws, seed):
        _check_cut(name, form, selected, cut_x, cut_batch, cut, TOLERANCE if tolerance is None else tolerance, seed)


def _check_cut(name: str, form: Form, params: Any, x: Any, batch: Batch, cut: Cut, tolerance: float, seed: int) -> None:
    wanted, wanted_dx, wanted_dparams, cotangent = autograd(form, params, x, batch, seed)
    _check_finite(name, {"output": wanted, "gradient of x": wanted_dx, "gradient of params": wanted_dparams})
    paths = {"x": _paths(x), "params": _paths(params)}
    start = [torch.full_like(leaf, 3.0) for leaf in floats(params)]
    for way in ways(form, cut.chunk):
        where = f"{name}, {way.name}"
        where += f", {cut.num_microbatches} microbatches" if cut.num_microbatches > 1 else ""
        hint = _hint(form, whole=way.name == "whole rows")
        pieces = cut.microbatches(x, batch)
        with _untouched(where, params, x, batch):
            outputs = [way.forward(params, x_piece, piece) for _, x_piece, piece in pieces]
        output = tree.map(lambda *parts: torch.cat(parts) if len(parts) > 1 else parts[0], *outputs)
        _expect_output(where, output, wanted, tolerance, hint)
        first: Flat | None = None
        summed: Flat | None = tuple(leaf.clone() for leaf in start)
        dxs = []
        with _untouched(where, params, x, batch):
            for covered, x_piece, piece in pieces:
                once, again = (tuple(leaf[covered].clone() for leaf in cotangent) for _ in range(2))
                dx, found = way.backward(params, x_piece, piece, once, first)
                dxs.append([leaf.clone() for leaf in dx])  # its memory may be a donated one
                first = tuple(leaf.clone() for leaf in whole_sums(found, start))
                _, found = way.backward(params, x_piece, piece, again, summed)
                summed = whole_sums(found, start)
        dx = tuple(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*dxs, strict=True))
        _expect_gradient(f"{where}: the gradient of x", paths["x"], list(dx), wanted_dx, tolerance, hint)
        _expect_gradient(
            f"{where}: the gradient of params", paths["params"], list(first or ()), wanted_dparams, tolerance, hint
        )
        total = [before + part for before, part in zip(start, wanted_dparams, strict=True)]
        what = f"{where}: the gradient of params, added to a sum,"
        _expect_gradient(what, paths["params"], list(summed or ()), total, tolerance, hint)


def _check_options(layer: Any, chunk: Any, tolerance: Any, draws: Any) -> None:
    problems = [] if chunk is None else count_problems({"chunk": chunk})
    problems += count_problems({"draws": draws})
    if tolerance is not None and not (is_real(tolerance) and 0 <= tolerance < 1):
        problems.append(f"tolerance is {shown(tolerance)}, it must be from 0, below 1, or None")
    if not isinstance(layer, Layer) and not all(hasattr(layer, verb) for verb in ("full", "forward", "backward")):
        problems.append(
            f"layer is a {type(layer).__name__}, needs a Layer or a form: rowwise(function), attending(kv, rows), "
            "recurrent(body, init) or opaque(function)"
        )
    if problems:
        raise OptionsError.listing("assert_streams", problems)


def _check_enough(name: str, form: Form, batch: Batch, segments: str | None) -> None:
    problems = []
    if segments is not None and segments not in batch.row:
        problems.append(
            f"segments is {segments!r}, which batch.row lacks; it has {sorted(batch.row)} (None: each example is one "
            "document)"
        )
    if batch.num_examples // batch.group_size < 2:
        problems.append(f"batch has {batch.num_examples} examples, {2 * batch.group_size} or more show if they mix")
    if knows_rows(form):
        least = max(3, (form.window or 0) + 1 if isinstance(form, Attending) else 0)
        if batch.num_rows < least:
            problems.append(f"batch has {batch.num_rows} rows, {least} or more show what the form promises")
        elif segments is not None and segments in batch.row and not _borders(batch, segments).any():
            problems.append(
                f"batch.row[{segments!r}] has one segment in each of the first {2 * batch.group_size} examples, two "
                "show if they mix"
            )
    if problems:
        raise OptionsError.listing(f"assert_streams of {name}", problems)


def _borders(batch: Batch, segments: str) -> Tensor:
    """Returns after which rows (T - 1) a segment ends in any of the examples that are looked at."""
    ids: Tensor = batch.row[segments][: 2 * batch.group_size]
    return (ids[:, 1:] != ids[:, :-1]).any(dim=0)


def _check_call(name: str, form: Form, params: Any, x: Any, batch: Batch) -> None:
    state = torch.get_rng_state()
    with _untouched(name, params, x, batch):
        one, other = form.full(params, x, batch), form.full(params, x, batch)
    _check_shapes(name, form, one, batch)
    _check_finite(name, {"output": one})
    draw = "draw with rpfunc.random from a key in batch.constant"
    if not torch.equal(state, torch.get_rng_state()):
        raise AssertionError(f"{name}: draws from torch's global random state, which no cut leaves alone; {draw}")
    for row in first_rows(other, one, 0.0):
        raise AssertionError(
            f"{name}: two calls with the same arguments differ at output row {row[1]}, so something else is read, "
            f"such as a global random state or what a call has left behind; {draw}"
        )


def _check_shapes(name: str, form: Form, output: Any, batch: Batch) -> None:
    leaves = list(zip(tree.paths(output), tree.leaves(output), strict=True))
    if not leaves:
        raise AssertionError(f"{name}: returned {output!r}, in which there is no tensor; is a `return` missing?")
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise AssertionError(f"{name}: output {path} is a {type(leaf).__name__}, it must be a tensor")
        needed = (batch.num_examples, batch.num_rows)
        if knows_rows(form) and leaf.shape[:2] != needed:
            raise AssertionError(
                f"{name}: output {path} has shape {tuple(leaf.shape)}, it must begin with (examples, rows), {needed}"
            )


def _check_sight(name: str, form: Form, params: Any, x: Any, batch: Batch, segments: str | None, seed: int) -> None:
    whole_x, whole = x, batch
    num_examples = 2 * batch.group_size
    num_rows = None
    if knows_rows(form):
        num_rows = min(batch.num_rows, max(8, (form.window or 0) + 2 if isinstance(form, Attending) else 0))
        if segments is not None:  # far enough for a second segment
            num_rows = min(batch.num_rows, max(num_rows, 3 + int(_borders(batch, segments).int().argmax())))
    x, batch = prefix(x, batch, num_examples, num_rows)
    params = _without_zeros(form, params, x, batch, seed)
    runs = {"": lambda x, batch: form.full(params, x, batch)}
    if num_rows is not None:
        runs[", 2 rows at a time"] = lambda x, batch: form.forward(params, x, batch, 2)
    for how, run in runs.items():
        with _noted(f"{name}{how}"):
            found = offence(form, run, x, batch, segments, seed=seed)
        if found is None and num_rows is not None and segments is not None:
            with _noted(f"{name}{how}"):
                found = foreign_document(form, run, whole_x, whole, segments, seed=seed)
        if found is not None:
            raise AssertionError(f"{name}{how}: {found}")


def _without_zeros(form: Form, params: Any, x: Any, batch: Batch, seed: int) -> Any:
    """Returns params with other values in leaves of zeros, which may hide what a row sees; as they were if that fails.

    The last weight of a residual branch often starts with zeros, and so does an adapter's.
    """
    generator = torch.Generator().manual_seed(seed)

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not is_inexact(leaf) or leaf.any():
            return leaf
        return (0.1 * torch.randn(leaf.shape, generator=generator)).to(leaf)

    changed = tree.map(other, params)
    return changed if all(leaf.isfinite().all() for leaf in floats(form.full(changed, x, batch))) else params


def _draw(form: Form, x: Any, batch: Batch, draws: int, seed: int) -> Iterator[tuple[Any, Batch, Cut]]:
    """Yields cuts that once caught something, then any."""
    random, groups = Random(seed), batch.num_examples // batch.group_size
    rows = batch.num_rows if knows_rows(form) else 1
    corners = [
        (groups, rows, 2, 1),
        (groups, rows, 1, 1),
        (groups, rows, max(1, rows - 1), 2),
        (1, rows, 3, 1),
        (groups, 1, 1, groups),
    ]
    for index in range(draws):
        if index < len(corners):
            num_groups, num_rows, chunk, microbatches = corners[index]
        else:
            num_groups, num_rows = random.randint(1, groups), random.randint(1, rows)
            chunk, microbatches = random.randint(1, min(num_rows + 5, 64)), random.randint(1, num_groups)
        cut_x, piece = prefix(x, batch, num_groups * batch.group_size, num_rows if knows_rows(form) else None)
        yield cut_x, piece, Cut(chunk, microbatches)


@contextmanager
def _noted(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {where}")
        raise


@contextmanager
def _untouched(where: str, params: Any, x: Any, batch: Batch) -> Iterator[None]:
    parts = {name: dict(getattr(batch, name)) for name in ("row", "example", "group", "constant")}
    raised = False
    try:
        with assert_untouched({"params": params, "x": x, "batch": parts}):
            try:
                with _noted(where):
                    yield
            except Exception:
                raised = True
                raise
    except AssertionError as error:
        if raised:
            raise
        raise AssertionError(f"{where}: {error}; a layer is a pure function, it returns new tensors") from None


def _check_finite(name: str, numbers: dict[str, Any]) -> None:
    for what, structured in numbers.items():
        for leaf in floats(structured):
            if not leaf.isfinite().all():
                place = [str(index) for index in (~leaf.isfinite()).nonzero()[0].tolist()]
                raise AssertionError(
                    f"{name}: {what}, whole rows, is {leaf[~leaf.isfinite()][0].item()} at [{', '.join(place)}]; a "
                    "softmax over nothing does that: give a row that sees nothing zeros, as rpfunc.stream.attend does"
                )


def _expect_output(where: str, found: Any, wanted: Any, tolerance: float, hint: str) -> None:
    try:
        assert_close(found, wanted, tolerance)
    except AssertionError as error:
        place = ""
        if tree.same_structure(found, wanted) and _shapes(found) == _shapes(wanted):
            place = next((f" row {row} of example {example}" for example, row in first_rows(found, wanted, 1e-12)), "")
        raise AssertionError(f"{where}: output{place} differs from that of whole rows ({error}){hint}") from None


def _expect_gradient(
    what: str, paths: list[str], found: list[Tensor], wanted: list[Tensor], tolerance: float, hint: str
) -> None:
    try:
        assert_close(found, wanted, tolerance)
    except AssertionError as error:
        leaf = ""
        if _shapes(found) == _shapes(wanted):
            wrong = [
                path for path, *pair in zip(paths, found, wanted, strict=True) if gradient_error(*pair) > tolerance
            ]
            leaf = f" ({', '.join(wrong)})" if any(wrong) else ""
        raise AssertionError(f"{what}{leaf} differs from that of torch.autograd ({error}){hint}") from None


def _hint(form: Form, whole: bool) -> str:
    places = "places and draws come from batch.first_example and batch.first_row"
    if whole:
        return f"; {places}"
    if isinstance(form, Attending | Bidirectional):
        own = "and its own are the last of them; " if isinstance(form, Attending) else ""
        return f"; `rows` must not depend on how many kv rows it is given, {own}{places}"
    if isinstance(form, Recurrent):
        return f"; `body` must give for rows cut in two what it gives for them together, by its state alone; {places}"
    return f"; {places}"


def _kind(form: Form) -> str:
    if isinstance(form, Attending):
        return "causal layer" if form.window is None else f"causal layer with window {form.window}"
    kinds = {Bidirectional: "bidirectional layer", Recurrent: "recurrent layer", RowWise: "row-wise layer"}
    return {**kinds, Opaque: "opaque layer"}.get(type(form), type(form).__name__)


def _paths(structured: Any) -> list[str]:
    pairs = zip(tree.paths(structured), tree.leaves(structured), strict=True)
    return [path for path, leaf in pairs if is_inexact(leaf)]


def _shapes(structured: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree.leaves(structured)]


def _double(leaf: Any) -> Any:
    return wide(leaf) if isinstance(leaf, Tensor) and is_inexact(leaf) else leaf
