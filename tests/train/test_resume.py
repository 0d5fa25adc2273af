"""Six steps straight equal three, a file, and three more in a process that knows nothing else: every bit."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rpfunc import Batch, State, optim, random, train_steps, tree
from rpfunc.errors import CheckpointError
from rpfunc.models import decoder, lora
from rpfunc.models.decoder import DecoderConfig
from rpfunc.models.lora import LoraConfig
from rpfunc.objectives import sft
from rpfunc.train import checkpoint

CONFIG = DecoderConfig(vocabulary=11, width=8, layers=2, heads=2, kv_heads=1, head_size=4, mlp_width=12, dropout=0.2)
NUM_STEPS, STOP = 6, 3
PRECISIONS = {"float32": "plain", "bfloat16": "grouped", "float16": "plain"}
CASES = [
    (adapted, asynchronous, precision, grouping)
    for adapted, asynchronous in itertools.product((False, True), repeat=2)
    for precision, grouping in PRECISIONS.items()
]
"""Whether adapters alone are trained, whether one step behind, what is computed in; `grouped`: the file is written in
the middle of an accumulation over two steps."""

pytestmark = pytest.mark.timeout(120)  # two processes that import torch


def name(case):
    adapted, asynchronous, precision, grouping = case
    return "-".join(["adapters" if adapted else "all", "behind" if asynchronous else "in-step", precision, grouping])


def adamw(grouping):
    warm = optim.adamw(optim.linear(0.0, 1e-2, 4), weight_decay=0.1)
    chain = optim.chain(optim.clip_by_global_norm(0.5), warm)
    return chain if grouping == "plain" else optim.accumulate(chain, 2)


def begin(case):
    model, params, frozen = decoder.model(CONFIG), decoder.init(CONFIG, random.key(0)), None
    if case[0]:
        model, params = lora.adapt(model, params, LoraConfig(("query", "value"), rank=2, dropout=0.2), random.key(1))
        frozen = lora.frozen
    return model, State.create(params, adamw(case[3]), frozen), frozen


def batch(step):
    key = random.fold_in(random.key(5), step)
    tokens = (random.uniform(key, (3, 6)) * 11).long()
    return Batch(row={"tokens": tokens, "labels": tokens}, constant={"key": key})


def go_on(case, state, stop, path):
    """Trains from where the state is; writes a file at the end. Returns (step, loss, norm, skipped, scale) of each."""
    model, _, frozen = begin(case)
    found = []
    running = train_steps(
        state, map(batch, range(state.step, stop)), model=model, objective=sft(), optimizer=adamw(case[3]),
        asynchronous=case[1], compute_dtype=getattr(torch, case[2]), frozen=frozen, microbatches=2, workers=2,
        plan="F0:2 X2:4 B0:2", donate=True,
    )  # fmt: skip
    for reached, result in running:
        state = reached
        found.append((result.step, result.loss.item(), result.grad_norm, result.skipped, result.loss_scale))
    checkpoint.save(path, state, {"results": repr(found)}, frozen=frozen)
    return found


def resume(case, folder):
    path = folder / name(case)
    _, like, frozen = begin(case)
    return go_on(case, checkpoint.load(path, like, frozen=frozen), NUM_STEPS, path.with_suffix(".resumed"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where one process has written the files of step 3, and another has gone on from them."""
    made = tmp_path_factory.mktemp("runs")
    for word in ("begin", "resume"):
        subprocess.run([sys.executable, __file__, word, str(made)], check=True, timeout=55)
    return made


@pytest.mark.parametrize("case", CASES, ids=name)
def test_three_steps_and_three_in_a_new_process_are_six(folder, tmp_path, case):
    straight, path = go_on(case, begin(case)[1], NUM_STEPS, tmp_path / "straight"), folder / name(case)
    results = [checkpoint.read_notes(file)["results"] for file in (path, path.with_suffix(".resumed"))]
    assert results == [repr(straight[:STOP]), repr(straight[STOP:])]
    found, wanted = load_file(path.with_suffix(".resumed")), load_file(tmp_path / "straight")
    assert found.keys() == wanted.keys()
    for leaf in wanted:
        assert found[leaf].dtype == wanted[leaf].dtype, leaf
        assert torch.equal(found[leaf], wanted[leaf]), leaf
    headers = [checkpoint.read_notes(file) for file in (path.with_suffix(".resumed"), tmp_path / "straight")]
    assert [(header["step"], header["scales"]) for header in headers] == [(str(NUM_STEPS), headers[0]["scales"])] * 2


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_file_holds_what_is_trained_and_nothing_else(folder, case):
    adapted, asynchronous, precision, _ = case
    tensors = load_file(folder / name(case))
    _, state, frozen = begin(case)
    _, trained = tree.partition(dict(state.params), False if frozen is None else frozen)
    paths = set(tree.paths(trained))
    assert adapted == (len(paths) < len(tree.leaves(dict(state.params))))
    for part, dtype in (("params", "float32"), ("stale", precision)):
        found = {leaf.removeprefix(f"{part}."): tensors[leaf] for leaf in tensors if leaf.startswith(f"{part}.")}
        assert set(found) == (paths if part == "params" or asynchronous else set())
        assert {leaf.dtype for leaf in found.values()} <= {getattr(torch, dtype)}


def test_what_an_asynchronous_run_reads_next_is_not_the_newest(folder):
    tensors = load_file(folder / name((False, True, "float32", "plain")))
    assert not torch.equal(tensors["stale.embedding"], tensors["params.embedding"])


def test_a_checkpoint_without_some_stale_leaves_is_refused(folder, tmp_path):
    from safetensors.torch import save_file

    case = (False, True, "bfloat16", "grouped")
    tensors, notes = load_file(folder / name(case)), checkpoint.read_notes(folder / name(case))
    lost = {leaf: tensor for leaf, tensor in tensors.items() if leaf != "stale.embedding"}
    save_file(lost, tmp_path / "lost", metadata=notes)
    with pytest.raises(CheckpointError, match=r"another model or optimizer: stale\.embedding is missing"):
        checkpoint.load(tmp_path / "lost", begin(case)[1])
    save_file(tensors | {"stale.embedding": torch.zeros(3)}, tmp_path / "other", metadata=notes)
    with pytest.raises(CheckpointError, match=r"stale\.embedding is \(3,\), the model needs \(11, 8\)"):
        checkpoint.load(tmp_path / "other", begin(case)[1])
    for damage in ({"scales": "[["}, {"scales": "[3]"}, {"step": "three"}):
        save_file(tensors, tmp_path / "damaged", metadata=notes | damage)
        with pytest.raises(CheckpointError, match="damaged: its header cannot be read"):
            checkpoint.load(tmp_path / "damaged", begin(case)[1])


def test_a_file_of_the_first_format_still_loads(folder, tmp_path):
    from safetensors.torch import save_file

    case = (False, False, "float32", "plain")
    tensors, notes = load_file(folder / name(case)), checkpoint.read_notes(folder / name(case))
    former = {"step": notes["step"], "format": "rpfunc checkpoint 1"}
    save_file(tensors, tmp_path / "former", metadata=former)
    straight = go_on(case, begin(case)[1], NUM_STEPS, tmp_path / "straight")
    loaded = checkpoint.load(tmp_path / "former", begin(case)[1])
    assert go_on(case, loaded, NUM_STEPS, tmp_path / "resumed") == straight[STOP:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in CASES:
        if sys.argv[1] == "begin":
            go_on(each, begin(each)[1], STOP, Path(sys.argv[2]) / name(each))
        else:
            resume(each, Path(sys.argv[2]))
