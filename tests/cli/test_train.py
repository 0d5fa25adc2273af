"""The command line: what it writes, what it refuses, and what a killed run leaves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.tiny_runs import TINY, metrics, saved, steps_done
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def command(folder, *arguments):
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    program = "import sys; from rpfunc.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_run_writes_what_it_says_and_twice_the_same(folder, rpfunc):
    code, output, errors = rpfunc("train", "tiny.toml")
    assert (code, errors) == (0, "")
    run = folder / "runs" / "tiny"
    for name in ("metrics.jsonl", "checkpoint.safetensors", "timeline.json", "timeline.png", "loss.png"):
        assert f"runs/tiny/{name}" in output
        assert (run / name).stat().st_size > 0
    assert "bits per byte before" in output
    assert output.count("\nIn the b") == 1
    assert len((run / "sample.txt").read_bytes()) == 8 + 12
    trace = json.loads((run / "timeline.json").read_text())
    assert {event["tid"] for event in trace["traceEvents"]} == {0, 1, 2}  # two workers, and updates on the host

    code, output, _ = rpfunc("train", "tiny.toml", "--execution.workers", "3")
    assert code == 0
    again = folder / "runs" / "tiny-2"  # the first run is not touched
    assert metrics(again) == metrics(run)
    assert saved(again) == saved(run)


@pytest.mark.parametrize("how", [(), ("--optimizer.async", "--precision", "bfloat16")], ids=" ".join)
def test_interrupted_and_killed_runs_continue_bit_for_bit(folder, rpfunc, how):
    assert rpfunc("train", "tiny.toml", "--out", "straight", "--steps", "60", *how)[0] == 0
    process = command(folder, "train", "tiny.toml", "--out", "broken", "--steps", "60", *how)
    wait_for_step(folder / "broken", 3, process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "")
    assert "rpfunc train --resume broken" in output
    assert 3 <= steps_done(folder / "broken") < 60

    process = command(folder, "train", "--resume", "broken")
    wait_for_step(folder / "broken", steps_done(folder / "broken") + 3, process)
    process.kill()
    process.communicate(timeout=30)
    assert steps_done(folder / "broken") < 60

    assert rpfunc("train", "--resume", "broken")[0] == 0
    assert metrics(folder / "broken") == metrics(folder / "straight")
    assert saved(folder / "broken") == saved(folder / "straight")
    code, output, _ = rpfunc("train", "--resume", "broken")
    assert (code, "after step 60 of 60" in output) == (0, True)
    assert saved(folder / "broken") == saved(folder / "straight")


HOW = {
    "asynchronous": ("--optimizer.async",),
    "bfloat16": ("--precision", "bfloat16"),
    "float16": ("--precision", "float16", "--optimizer.async"),
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_staleness_and_precision_change_the_run_and_workers_do_not(folder, rpfunc, how):
    runs = {}
    for out, flags in (("plain", ()), ("one", (*how, "--workers", "1")), ("three", (*how, "--execution.workers", "3"))):
        assert rpfunc("train", "tiny.toml", "--out", out, *flags)[0] == 0
        runs[out] = metrics(folder / out), saved(folder / out)
    assert runs["one"] == runs["three"]
    assert runs["one"] != runs["plain"]
    stale = [name for name in runs["one"][1] if name.startswith("stale.")]
    assert bool(stale) == ("--optimizer.async" in how)
    scales = [record.get("loss_scale") for record in runs["one"][0] if "bits_per_byte" in record]
    assert scales == ([2.0**16, 2.0**16, *scales[2:]] if "float16" in how else [None] * 6)
    records = {out: [record for record in runs[out][0] if "learning_rate" in record] for out in runs}
    applied = [record["learning_rate"] for record in records["one"] if not record["skipped"]]
    assert (
        applied == [record["learning_rate"] for record in records["plain"]][: len(applied)]
    )  # a skip is no step of it
    code, output, errors = rpfunc("train", "--resume", "one")
    assert (code, errors, "after step 6 of 6" in output) == (0, "", True)


def test_a_config_sets_staleness_and_precision_and_flags_win(folder, rpfunc):
    text = TINY.replace("steps = 6", 'steps = 6\nprecision = "bfloat16"', 1) + "[optimizer]\nasync = true\n"
    (folder / "behind.toml").write_text(text)
    assert rpfunc("train", "behind.toml", "--out", "a")[0] == 0
    assert rpfunc("train", "behind.toml", "--out", "b", "--optimizer.no-async", "--precision", "float32")[0] == 0
    options = [json.loads((folder / run / "options.json").read_text()) for run in ("a", "b")]
    assert [(each["precision"], each["optimizer"]["asynchronous"]) for each in options] == [
        ("bfloat16", True),
        ("float32", False),
    ]


def test_workers_with_a_memory_limit_say_what_they_held_and_refuse_what_does_not_fit(folder, rpfunc):
    assert rpfunc("train", "tiny.toml", "--out", "free", "--steps", "2")[0] == 0
    assert rpfunc("train", "tiny.toml", "--out", "kept", "--steps", "2", "--worker-memory", "50000000")[0] == 0
    assert saved(folder / "free") == saved(folder / "kept")
    steps = [record for record in metrics(folder / "kept") if "bits_per_byte" in record]
    assert len(steps) == 2
    assert all(0 < record["worker_peak_bytes"] <= 50_000_000 for record in steps)
    assert not any("worker_peak_bytes" in record for record in metrics(folder / "free"))
    code, _, errors = rpfunc("train", "tiny.toml", "--out", "small", "--worker-memory", "1000")
    assert code == 2
    assert "its --worker-memory is 1,000; --worker-memory=" in errors
    assert "Traceback" not in errors
    assert "(parameters 0," in errors  # the host has cast them already
    described = " ".join(re.sub(r"[│\n]", " ", rpfunc("train", "--help")[1]).split())
    assert "what its tasks make, and parameters that it casts" in described


def test_a_run_of_before_there_was_a_precision_continues(folder, rpfunc):
    assert rpfunc("train", "tiny.toml", "--out", "straight")[0] == 0
    assert rpfunc("train", "tiny.toml", "--out", "run", "--evaluate-every", "3", "--checkpoint-every", "6")[0] == 0
    path, options = folder / "run" / "checkpoint.safetensors", folder / "run" / "options.json"
    with safe_open(path, framework="pt") as file:
        notes = dict(file.metadata())
    del notes["scales"]
    notes["format"] = "rpfunc checkpoint 1"
    former = json.loads(notes["options"])
    del former["precision"], former["optimizer"]["asynchronous"]
    notes["options"] = json.dumps(former)
    save_file(load_file(path), path, metadata=notes)
    options.write_text(json.dumps(former))
    code, output, errors = rpfunc("train", "--resume", "run")
    assert (code, errors, "after step 6 of 6" in output) == (0, "", True)
    assert saved(folder / "run") == saved(folder / "straight")


def wait_for_step(run: Path, step, process):
    limit = time.monotonic() + 40
    while not (run / "checkpoint.safetensors").exists() or steps_done(run) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_sample_goes_on_from_a_prompt_and_repeats_itself(rpfunc):
    assert rpfunc("train", "tiny.toml", "--out", "run", "--steps", "1")[0] == 0
    arguments = ("sample", "run", "--prompt", "In the", "--length", "20", "--temperature", "0")
    first, second = rpfunc(*arguments), rpfunc(*arguments)
    assert first == second
    assert first[0] == 0
    assert first[1].startswith("In the")


def test_help_names_the_commands_and_options(rpfunc):
    code, output, _ = rpfunc("--help")
    assert code == 0
    assert "train" in output
    assert "sample" in output
    code, output, _ = rpfunc("train", "--help")
    assert code == 0
    for option in (
        "--optimizer.async",
        "--precision",
        "--worker-memory",
        "--workers",
        "--model.width",
        "--optimizer.learning-rate",
        "--execution.chunk",
        "--resume",
        "--out",
    ):
        assert option in output


BAD = {
    "no such config": (["train", "none.toml"], "config: cannot read none.toml: No such file"),
    "unknown flag": (["train", "tiny.toml", "--model.widht", "9"], "widht"),
    "unknown key": (["train", "unknown.toml"], "'colour' is no option"),
    "no TOML": (["train", "broken.toml"], "broken.toml is no TOML file"),
    "command name as key": (["train", "command.toml"], "'sample' is no option"),
    "unknown nested key": (["train", "nested.toml"], "widht"),
    "no such precision": (["train", "tiny.toml", "--precision", "float8"], "float32"),
    "another name for one step behind": (["train", "asynchronous.toml"], "async"),
    "wrong type": (["train", "tiny.toml", "--steps", "many"], "many"),
    "several wrong values": (
        ["train", "tiny.toml", "--steps", "0", "--data.rows", "1", "--execution.chunk", "0"],
        "options: 3 problems",
    ),
    "a model that cannot be": (
        ["train", "tiny.toml", "--model.heads", "3", "--model.kv-heads", "2"],
        "multiple of kv_heads 2",
    ),
    "a plan of another model": (["train", "tiny.toml", "--execution.plan", "F0:1 X1:9 B0:1"], "the model has 3 layers"),
    "no text": (["train", "tiny.toml", "--data.text", "none.txt"], "none.txt: No such file"),
    "an empty text": (["train", "tiny.toml", "--data.text", "empty.txt"], "has 0 tokens"),
    "a short text": (["train", "tiny.toml", "--data.rows", "5000"], "one row of data.rows needs 5000"),
    "too little memory": (["train", "tiny.toml", "--worker-memory", "1000"], "its --worker-memory is 1,000"),
    "a folder that exists": (["train", "tiny.toml", "--out", "taken"], "cannot make taken: File exists"),
    "resume without a run": (["train", "--resume", "none"], "cannot read options.json"),
    "resume with a config and no run": (["train", "tiny.toml", "--resume", "taken"], "cannot read options.json"),
    "sample without a run": (["sample", "none"], "run none: there is no such folder"),
    "no command": (["trian"], "trian"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_message_and_exit_code_2(folder, rpfunc, case):
    arguments, message = BAD[case]
    (folder / "taken").mkdir()
    (folder / "taken" / "precious").write_text("mine")
    (folder / "empty.txt").write_text("")
    (folder / "unknown.toml").write_text('colour = "red"\n')
    (folder / "command.toml").write_text("sample = 3\n")
    (folder / "nested.toml").write_text("[model]\nwidht = 8\n")
    (folder / "asynchronous.toml").write_text("[optimizer]\nasynchronous = true\n")
    (folder / "broken.toml").write_text("steps = = 3\n")
    before = sorted(str(path) for path in folder.rglob("*"))
    code, output, errors = rpfunc(*arguments)
    assert code == 2, (output, errors)
    assert message in errors
    assert "Traceback" not in errors
    assert errors.startswith("rpfunc: ")
    assert sorted(str(path) for path in folder.rglob("*")) == before
    assert (folder / "taken" / "precious").read_text() == "mine"


def test_a_spoilt_run_folder_is_refused_and_left_alone(folder, rpfunc):
    assert rpfunc("train", "tiny.toml", "--out", "run", "--steps", "2")[0] == 0
    checkpoint, options, text = (
        folder / "run" / "checkpoint.safetensors",
        folder / "run" / "options.json",
        folder / "text.txt",
    )
    kept = {path: path.read_bytes() for path in (checkpoint, options, text)}

    def refused(path, content, message):
        path.write_bytes(content)
        everything = {file: file.read_bytes() for file in (folder / "run").iterdir()}
        code, _, errors = rpfunc("train", "--resume", "run")
        assert (code, message in errors, "Traceback" in errors) == (2, True, False), errors
        assert {file: file.read_bytes() for file in (folder / "run").iterdir()} == everything
        path.write_bytes(kept[path])

    refused(checkpoint, kept[checkpoint][:-100], "is cut short")
    refused(options, kept[options].replace(b'"width": 8', b'"width": 10'), "is of another model or optimizer")
    refused(options, b"{", "is not a run's options")
    refused(text, kept[text].replace(b"God", b"Gad"), "is not the text that the run learnt")
    assert rpfunc("train", "--resume", "run")[0] == 0
