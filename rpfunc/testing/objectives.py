"""What an objective promises, checked on draws of shapes, cuts and seeds; needs hypothesis (the `test` extra)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rpfunc import reference, tree
from rpfunc.batch import Batch
from rpfunc.model import Layer, Model
from rpfunc.objectives import IGNORED, Objective
from rpfunc.objectives.checked import checked
from rpfunc.runtime import value_and_grad
from rpfunc.stream import rowwise
from rpfunc.stream.flat import rows, vjp
from rpfunc.testing.oracles import assert_close, assert_equal_bits

GARBAGE = (1e30, -200.0, float("nan"), float("inf"), float("-inf"))
FINITE = 2
"""So many of them are finite, as what a model puts out should be."""
TOLERANCE = 1e-10

Place = tuple[str, str]
"""A leaf of a batch: its kind (row, example or group) and its path there."""

Run = Callable[[Any, Batch], dict[str, Any]]
"""(output, batch) -> {"loss": (), "grads": like output}"""


def assert_streams_objective(
    objective: Objective,
    make_batch: Callable[[int, int, int], Batch],
    vocabulary: int,
    *,
    make_output: Callable[[int, int, torch.Generator], Any] | None = None,
    dense: Callable[[Any, Batch], Tensor] | None = None,
    shifted: bool = True,
    max_examples: int = 25,
) -> None:
    """Raises AssertionError, saying which, where `objective` breaks one of its promises in any of `max_examples` draws.

    make_batch   (number of groups, T, seed) -> batch with row leaf `labels` and whatever the objective reads, float64.
                 Leave some labels -100, and now and then a whole example
    vocabulary   labels are below it
    make_output  (B, T, generator) -> the model's output, a tree of float64 leaves (B, T, ...); None: logits (B, T, V)
    dense        (output, batch) -> loss (), the formula in plain torch operations, to compare with
    shifted      row t of the output is scored by label t + 1, as a language model's is; False: by label t

    The promises: each function returns what `Objective` says; totals of parts add up to the whole's; a row's score
    depends on that row alone; `linear` is true; any chunk and number of microbatches gives
    the loss and gradients of one plain vjp; where no label leaves a total of 0, loss and gradients are 0; labels of
    -100 take all that stands at their places out of the loss, bit for bit, and out of every count; every
    floating-point or boolean leaf of the batch has an effect in some draw.
    Row leaves (B, T, ...) are aligned with tokens, as `rpfunc.objectives.targets` has it.
    """
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    from rpfunc.testing.strategies import chunks

    objective = checked(objective)
    totals: list[float] = []
    unread: set[Place] = set()
    read: set[Place] = set()

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],  # draws are small as they are, and a shrunk one may break another promise
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: Any) -> None:
        num_groups, num_rows = data.draw(st.integers(1, 4), "groups"), data.draw(st.integers(1, 8), "rows")
        seed = data.draw(st.integers(0, 10_000), "seed")
        batch = make_batch(num_groups, num_rows, seed)
        generator = torch.Generator().manual_seed(seed)
        shape = batch.num_examples, num_rows
        logits = torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64)
        output = logits if make_output is None else make_output(*shape, generator)
        chunk, microbatches = data.draw(chunks(num_rows), "chunk"), data.draw(st.integers(1, 4), "microbatches")
        run = _streamed(objective, microbatches, chunk)
        totals.append(_check_total(objective, batch))
        _check_rows(objective, output, batch)
        _check_finite(objective, output, batch)
        if objective.linear:
            _check_linear(objective, output, batch)
        plain = _plain(objective)(output, batch)
        _expect(
            "streamed loss and gradients are not those of one plain vjp (divide by `total`, which counts all "
            "microbatches; a chunk or a microbatch has no denominator of its own)",
            lambda: assert_close(run(output, batch), plain, TOLERANCE),
        )
        if dense is not None:
            _expect(
                "loss and gradients are not those of the dense formula",
                lambda: assert_close(plain, _autograd(dense, output, batch), TOLERANCE),
            )
        _check_masked_contents(run, output, batch, generator, shifted)
        _check_masked_groups(_plain(objective), output, batch)
        _check_padding(_plain(objective), output, batch)
        for place in _inexact(batch):
            unread.add(place)
            if place not in read and _has_effect(_plain(objective), output, batch, place, plain):
                read.add(place)

    check()
    assert any(totals), (
        f"{objective.name}: `total` was 0 in all draws, so nothing was ever scored; `make_batch` must give labels, too"
    )
    without = sorted(f"{kind} leaf {path!r}" for kind, path in unread - read)
    assert not without, f"{objective.name}: no effect on the loss in any draw, so not read: {', '.join(without)}"


def table() -> Model:
    """Returns the model whose output is its parameters, subtree `output`: every row's own gradient can be seen."""

    def look_up(output: Any, x: Any, batch: Batch) -> Any:
        del x
        first, stop = batch.first_example, batch.first_example + batch.num_examples
        return rows(tree.map(lambda leaf: leaf[first:stop], output), batch.first_row, batch.first_row + batch.num_rows)

    return Model((Layer("table", rowwise(look_up), "output"),))


def _check_total(objective: Objective, batch: Batch) -> float:
    """Returns the batch's total, which is that of its groups, prepared one by one, added up."""
    total = float(objective.total(objective.prepare(batch)))
    parts = [float(objective.total(objective.prepare(piece))) for piece in batch.microbatches(batch.num_examples)]
    assert abs(sum(parts) - total) <= TOLERANCE * max(1.0, abs(total)), (
        f"`total` is {total:g} of the whole batch, and {sum(parts):g} added up over its groups; it must add up, so "
        "that a loss can be accumulated over several batches"
    )
    return total


def _check_rows(objective: Objective, output: Any, batch: Batch) -> None:
    prepared = objective.prepare(batch)
    whole = objective.score(output, prepared)
    assert whole.shape[1] == batch.num_rows, (
        f"`score` returns {whole.shape[1]} rows for {batch.num_rows}, it must return one for each row (labels are "
        "shifted in `prepare`, on whole rows)"
    )
    for row in range(batch.num_rows):
        alone = objective.score(rows(output, row, row + 1), prepared.rows(row, row + 1))
        _expect(
            f"the score of row {row} is another one when the row stands alone; it may depend on its own row only "
            "(labels are shifted in `prepare`, on whole rows)",
            partial(assert_close, alone, whole[:, row : row + 1], TOLERANCE),
        )


def _check_finite(objective: Objective, output: Any, batch: Batch) -> None:
    sums, loss_at = _loss_of_sums(objective, output, batch)
    loss, derivative = loss_at(sums)
    total = float(objective.total(objective.prepare(batch)))
    found = f"the loss is {loss.item():g} and its derivative by the sums {derivative.flatten().tolist()}"
    assert total != 0 or (loss == 0 and derivative.isfinite().all()), (
        f"no label at all in a batch, so `total` is 0: the loss must be 0, its derivative finite, but {found} (0/0 is "
        "nan: divide by 1 there, as rpfunc.objectives.weighted_mean does)"
    )
    assert loss.isfinite() and derivative.isfinite().all(), (
        f"{found}, of finite sums {sums.flatten().tolist()} and a total of {total:g}; they must be finite"
    )


def _check_linear(objective: Objective, output: Any, batch: Batch) -> None:
    sums, loss_at = _loss_of_sums(objective, output, batch)
    _expect(
        "declared linear, but the derivative of `loss` by the sums changes with the sums",
        lambda: assert_close(loss_at(sums)[1], loss_at(torch.zeros_like(sums))[1], TOLERANCE),
    )


def _loss_of_sums(
    objective: Objective, output: Any, batch: Batch
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Returns the whole batch's sums, and a function of them: (loss, its derivative)."""
    prepared = objective.prepare(batch)
    total, sums = objective.total(prepared), objective.score(output, prepared).double().sum(dim=1)
    if objective.statistic is not None:
        constant = {**prepared.constant, "statistic": objective.statistic(sums, prepared)}
        prepared = replace(prepared, constant=constant)

    def loss_at(sums: Tensor) -> tuple[Tensor, Tensor]:
        loss, pull = vjp(lambda sums: objective.loss(sums, prepared, total), sums)
        ((derivative,),) = pull((torch.ones((), dtype=torch.float64),))
        return loss, derivative

    return sums, loss_at


def _check_masked_contents(run: Run, output: Any, batch: Batch, generator: torch.Generator, shifted: bool) -> None:
    """Compares 0 with garbage in all that stands at places without a label, in the batch and in the output."""
    masked = no_target = batch.row["labels"] == IGNORED
    if shifted:
        masked[:, :1] = True  # nothing predicts the first token
        no_target = F.pad(masked[:, 1:], (0, 1), value=True)
    examples = masked.all(dim=1)
    groups = examples.view(-1, batch.group_size).all(dim=1)
    garbage = torch.tensor(GARBAGE, dtype=torch.float64)

    def fill(leaf: Tensor, mask: Tensor, filled: bool, kinds: int = len(GARBAGE)) -> Tensor:
        mask = mask.reshape(*mask.shape, *(1,) * (leaf.dim() - mask.dim()))
        if not leaf.is_floating_point():  # others of its own values, since not every one may have a meaning
            draws = leaf.flatten()[torch.randint(leaf.numel(), leaf.shape, generator=generator)]
            return torch.where(mask, draws if leaf.dtype != torch.bool or filled else ~leaf, leaf)
        draws = garbage[torch.randint(kinds, leaf.shape, generator=generator)].to(leaf.dtype)
        return torch.where(mask, draws if filled else torch.zeros_like(leaf), leaf)

    def both(filled: bool) -> dict[str, Any]:
        row = {
            name: leaves if name == "labels" else tree.map(lambda leaf: fill(leaf, masked, filled), leaves)
            for name, leaves in batch.row.items()
        }
        example = tree.map(lambda leaf: fill(leaf, examples, filled), dict(batch.example))
        group = tree.map(lambda leaf: fill(leaf, groups, filled), dict(batch.group))
        filled_output = tree.map(lambda leaf: fill(leaf, no_target, filled, FINITE), output)
        return run(filled_output, replace(batch, row=row, example=example, group=group))

    _expect(
        "what stands where there is no label changes the loss or a gradient (put 0 there before any arithmetic: a "
        "mask applied to a result leaves nan in its gradient)",
        lambda: assert_equal_bits(both(filled=True), both(filled=False)),
    )


def _check_masked_groups(run: Run, output: Any, batch: Batch) -> None:
    """Compares a batch whose last group has no label with one that lacks that group."""
    kept = batch.num_examples - batch.group_size
    if kept:
        labels = batch.row["labels"].clone()
        labels[kept:] = IGNORED
        masked = run(output, replace(batch, row={**batch.row, "labels": labels}))
        fewer = run(tree.map(lambda leaf: leaf[:kept], output), batch.examples(0, kept))
        masked["grads"] = tree.map(lambda leaf: leaf[:kept], masked["grads"])
        _expect(
            "examples without a label still count, in a denominator or a statistic (one mean, one mask)",
            lambda: assert_close(masked, fewer, TOLERANCE),
        )


def _check_padding(run: Run, output: Any, batch: Batch) -> None:
    """Compares a batch with one that has a row without a label more."""

    def longer(leaf: Tensor, fill: float) -> Tensor:
        return torch.cat((leaf, torch.full_like(leaf[:, :1], fill)), dim=1)

    row = {name: tree.map(lambda leaf: longer(leaf, 0), leaves) for name, leaves in batch.row.items()}
    padded = replace(batch, row={**row, "labels": longer(batch.row["labels"], IGNORED)})
    found = run(tree.map(lambda leaf: longer(leaf, 0), output), padded)
    found["grads"] = rows(found["grads"], 0, batch.num_rows)
    _expect(
        "a row of padding changes the loss or a gradient (rows without a label count for nothing)",
        lambda: assert_close(found, run(output, batch), TOLERANCE),
    )


def _has_effect(run: Run, output: Any, batch: Batch, place: Place, before: dict[str, Any]) -> bool:
    kind, path = place
    leaves, structure = tree.flatten(dict(getattr(batch, kind)))
    index = tree.paths(dict(getattr(batch, kind))).index(path)
    value = leaves[index]
    leaves[index] = (
        ~value if value.dtype == torch.bool else value + torch.linspace(0.1, 0.9, value.numel()).view(value.shape)
    )
    after = run(output, replace(batch, **{kind: tree.unflatten(structure, leaves)}))
    pairs = zip(tree.leaves(after), tree.leaves(before), strict=True)
    return any(not torch.equal(one, two) for one, two in pairs)


def _inexact(batch: Batch) -> Iterator[Place]:
    for kind in ("row", "example", "group"):
        leaves = dict(getattr(batch, kind))
        for path, leaf in zip(tree.paths(leaves), tree.leaves(leaves), strict=True):
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.dtype == torch.bool):
                yield kind, path


def _streamed(objective: Objective, microbatches: int, chunk: int | None) -> Run:
    def run(output: Any, batch: Batch) -> dict[str, Any]:
        function = value_and_grad(table(), objective, microbatches=microbatches, chunk=chunk)
        result, grads = function({"output": output}, batch)
        return {"loss": result.loss, "grads": grads["output"]}

    return run


def _plain(objective: Objective) -> Run:
    def run(output: Any, batch: Batch) -> dict[str, Any]:
        loss, grads = reference.value_and_grad(table(), objective)({"output": output}, batch)
        return {"loss": loss, "grads": grads["output"]}

    return run


def _autograd(dense: Callable[[Any, Batch], Tensor], output: Any, batch: Batch) -> dict[str, Any]:
    leaves, structure = tree.flatten(tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), output))
    loss = dense(tree.unflatten(structure, leaves), batch)
    if not loss.requires_grad:  # nothing in this batch is scored
        return {"loss": loss, "grads": tree.zeros_like(output)}
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return {"loss": loss.detach(), "grads": tree.unflatten(structure, grads)}


def _expect(promise: str, check: Callable[[], None]) -> None:
    try:
        check()
    except AssertionError as error:
        raise AssertionError(f"{promise}: {error}") from error
