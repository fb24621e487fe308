"""Runs ``python -m instep.bench --quick`` from end to end: its table, CSV, picture, and the report of a missing peer."""

import csv
import subprocess
import sys
import time
import types
import xml.etree.ElementTree as xml
from dataclasses import replace

import pytest
import torch

from instep.bench import __main__ as program
from instep.bench.__main__ import LEAST_ROUNDS, Progress, rounds, run
from instep.bench.candidates import CANDIDATES, CHECKED_STEPS, FORMATS, LR, OFFLOADED, Candidate, Made, tolerance
from instep.bench.report import Case
from instep.bench.rounds import PAUSE_S

PEERS = ("deepspeed", "bitsandbytes", "torchao")
CASES = ("bucket", "in cache", "beyond cache")
# Whatever is installed, no peer is found.
HIDDEN = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({PEERS}))
runpy.run_module("instep.bench", run_name="__main__", alter_sys=True)
"""
# A peer that is installed and whose optimizer raises, and one that makes no step.
BROKEN = """
import importlib.util, runpy, sys, types
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: name in ("torchao", "bitsandbytes") or found(name, package)
import torch
def optimizer(step):
    return type("AdamW8bit", (torch.optim.SGD,), {"step": step})
def refuses(self):
    raise RuntimeError("no compiler")
sys.modules["torchao.optim"] = types.SimpleNamespace(AdamW8bit=optimizer(refuses))
sys.modules["bitsandbytes.optim"] = types.SimpleNamespace(AdamW8bit=optimizer(lambda self: None))
sys.modules["deepspeed"] = None
runpy.run_module("instep.bench", run_name="__main__", alter_sys=True)
"""


def bench(program, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", program, "--quick", "--threads", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    ran = bench(HIDDEN, "--csv", str(folder / "a.csv"), "--svg", str(folder / "a.svg"))
    return types.SimpleNamespace(out=ran.stdout, err=ran.stderr, csv=folder / "a.csv", svg=folder / "a.svg")


def rows_of(table, name):
    return [line.split(name)[1].split() for line in table.splitlines() if line.strip().startswith(f"{name} ")]


def test_the_table_has_every_candidate_in_every_case(written):
    tables = written.out.split("\n\n")[1 : 1 + len(CASES)]
    assert [table.split(":")[0] for table in tables] == list(CASES)
    for table in tables:
        assert "ms per step" in table and "ns per element" in table and "time / instep's" in table
        for candidate in CANDIDATES:
            shown = rows_of(table, candidate.name)
            assert len(shown) == sum(other.name == candidate.name for other in CANDIDATES)
            if candidate.package in PEERS:
                assert shown == [["not", "installed"]]
            else:
                assert all(float(row[0]) > 0 and float(row[2]) > 0 for row in shown)


def test_missing_peers_are_named_in_the_head_and_progress_is_on_stderr(written):
    head = written.out.split("\n\n")[0]
    assert all(f"{peer} not installed" in head for peer in PEERS)
    assert f"torch {torch.__version__}" in head and "quick" in head
    assert written.out.count("; 2 rounds") == len(CASES)
    stages = 2 * len(CASES) * (len(CANDIDATES) + 1)
    assert written.err.splitlines()[-1].startswith(f"{stages} of {stages}: ")


def test_the_csv_has_each_time_and_ratio_and_names_what_is_missing(written):
    lines = written.csv.read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    timed = [c for c in CANDIDATES if c.package not in PEERS]
    keys = {(row["candidate"], row["format"], row["case"], row["quantity"]) for row in rows}
    quantities = ("ms_per_step", "times_instep")
    assert keys == {(c.name, c.format, case, what) for c in timed for case in CASES for what in quantities}
    for row in rows:
        assert 0 < float(row["min"]) <= float(row["median"]) <= float(row["max"])
        if row["quantity"] == "times_instep" and row["candidate"].startswith("instep"):
            assert row["min"] == row["max"] == "1.00000"
    for candidate in CANDIDATES:
        named = [line for line in lines if line.startswith("#") and f"{candidate.name}: not installed" in line]
        assert len(named) == (len(CASES) if candidate.package in PEERS else 0)


def test_the_picture_is_xml_with_every_candidate_and_a_bar_for_each_time(written):
    picture = xml.fromstring(written.svg.read_text())
    tag = "{http://www.w3.org/2000/svg}"
    texts = [text.text or "" for text in picture.iter(f"{tag}text")]
    for candidate in CANDIDATES:
        assert texts.count(candidate.name) == sum(other.name == candidate.name for other in CANDIDATES)
    timed = len(CASES) * sum(c.package not in PEERS for c in CANDIDATES)
    assert len(picture.findall(f"{tag}rect")) == timed + 1
    assert sum(" ms" in text and text[0].isdigit() for text in texts) == timed
    assert texts.count("not installed") == len(CASES) * len(PEERS)
    assert texts[0].startswith("One AdamW step on ") and f"torch {torch.__version__}" in texts[1]
    width, height = (float(picture.get(side)) for side in ("width", "height"))
    for bar in picture.findall(f"{tag}rect")[1:]:
        assert 0 <= float(bar.get("x")) <= float(bar.get("x")) + float(bar.get("width")) <= width
        assert 0 <= float(bar.get("y")) <= height


def test_both_halves_have_equal_rounds_and_reverse_orders_and_a_failure_in_the_second_is_named(monkeypatch):
    made, paused = [], []

    def make(candidate, case):
        made.append(candidate.name)
        if candidate.name == "third" and made.count("third") == 2:
            return "does not run here: RuntimeError", None
        return None, types.SimpleNamespace(step=lambda: paused.append("step"))

    monkeypatch.setattr(program, "made", make)
    monkeypatch.setattr("time.sleep", paused.append)
    packages = {"first": "instep", "second": "torch", "third": "torch"}
    candidates = [Candidate("f32", name, None, package) for name, package in packages.items()]
    results = run(Case("bucket", 1, 1), candidates, False, time.monotonic(), time.monotonic() + 0.2, Progress(8))
    assert made == ["first", "second", "third", "third", "second", "first"]
    first, second, third = results.lines
    assert len(first.times) == len(second.times) and len(first.times) % 2 == 0 and len(first.times) >= 2 * LEAST_ROUNDS
    assert (third.missing, third.times, third.to_ours) == ("does not run here: RuntimeError", [], None)
    assert paused[::2] == [PAUSE_S] * (len(paused) // 2) and set(paused[1::2]) == {"step"}


def test_a_peer_that_fails_or_differs_is_named_and_not_timed():
    out = bench(BROKEN).stdout
    assert out.count("torchao AdamW8bit         does not run here: RuntimeError: no compiler") == len(CASES)
    assert out.count("bitsandbytes AdamW8bit    not timed: differs from AdamW in f64 by ") == len(CASES)


def test_the_step_of_offloaded_training_has_its_own_candidates():
    tables = bench(HIDDEN, "--offload").stdout.split("\n\n")[1 : 1 + len(CASES)]
    assert [table.split(":")[0] for table in tables] == list(CASES)
    for table in tables:
        for candidate in OFFLOADED:
            for shown in rows_of(table, candidate.name):
                missing = shown == ["not", "installed"]
                assert missing == (candidate.package in PEERS) and (missing or float(shown[0]) > 0)


@pytest.mark.parametrize("format", ["f32", "8-bit states"])
def test_copies_that_a_step_did_not_write_are_not_timed(format):
    right = next(candidate for candidate in OFFLOADED if candidate.format == format and candidate.is_ours)
    assert Made(right, 2, 5000).check() is None

    def leaves_one(params):
        optimizer = right.make(params)
        step, last = optimizer.step, params[-1]

        def and_restore():
            before = last.detach().clone()
            step()
            last.data.copy_(before)

        optimizer.step = and_restore
        return optimizer

    said = Made(replace(right, make=leaves_one), 2, 5000).check()
    assert said == "copies are not the parameters in bf16 after step 1"


@pytest.mark.parametrize("format", FORMATS)
def test_the_tolerance_sees_a_wrong_learning_rate_and_a_lost_state(format):
    right = next(candidate for candidate in CANDIDATES if candidate.format == format and candidate.is_ours)
    assert Made(right, 2, 5000).check() is None
    assert CHECKED_STEPS * LR > tolerance(format, CHECKED_STEPS)

    def slower(params):
        optimizer = right.make(params)
        optimizer.param_groups[0]["lr"] = 0.8 * LR
        return optimizer

    def forgets(params):
        optimizer = right.make(params)
        step = optimizer.step

        def and_forget():
            step()
            for state in optimizer.state.values():
                state["step"].zero_()

        optimizer.step = and_forget
        return optimizer

    for make, number in ((slower, 1), (forgets, 2)):
        said = Made(Candidate(format, "wrong", make), 2, 5000).check()
        assert said is not None and f"after step {number}" in said


def test_a_case_without_time_left_still_gets_the_rounds_of_a_median():
    assert len(list(rounds(LEAST_ROUNDS + 1, 32, -1.0, lambda _: None))) == LEAST_ROUNDS + 1
