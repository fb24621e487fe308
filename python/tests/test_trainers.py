"""Changes one line in a program with transformers' Trainer, and in a program with accelerate. The tests make their own
small models. Every step is judged against torch's AdamW within a derived bound.
"""

from functools import partial

import pytest
import torch
from judged import assert_close_runs, judged
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import instep.torch
from instep.torch import FusedOptimizer

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

HYPER = {"lr": 1e-3, "weight_decay": 0.01}
LINES = {
    "class": lambda adamw, net: {"optimizer_cls_and_kwargs": (adamw, HYPER)},
    "instance": lambda adamw, net: {"optimizers": (adamw(net.parameters(), **HYPER), None)},
}
"""The ways in which a Trainer takes an optimizer. Each is one line of a program, and only ``adamw`` changes in it."""


class Bytes(Dataset):
    """Yields pieces of this file."""

    def __init__(self) -> None:
        self.text = torch.frombuffer(bytearray(open(__file__, "rb").read()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self.text[index * 8 : index * 8 + 16]
        return {"input_ids": piece, "labels": piece}


def model() -> torch.nn.Module:
    """Returns a GPT-2 of two thin layers."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


def values(net: torch.nn.Module) -> dict[str, Tensor]:
    """Returns copies of the parameters."""
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def states(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Tensor]:
    """Returns copies of the states, by the parameter's number and the state's name."""
    saved = optimizer.state_dict()["state"]
    return {(number, name): torch.as_tensor(value).clone() for number, of in saved.items() for name, value in of.items()}


def has_bits_of(one, other) -> bool:
    """Whether two runs have ended with the same parameters and states."""
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other))


def train(folder, adamw, line, resume=None, **options) -> tuple[dict[str, Tensor], dict[tuple[int, str], Tensor]]:
    """Trains with transformers. Returns parameters and states."""
    net = model()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
        weight_decay=HYPER["weight_decay"],
        **options,
    )
    trainer = transformers.Trainer(net, arguments, train_dataset=Bytes(), **LINES[line](adamw, net))
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(trainer.optimizer.optimizer, adamw)
    return values(net), states(trainer.optimizer)


@pytest.mark.parametrize("line, bf16", [("class", False), ("class", True), ("instance", False)])
def test_transformers_trains_to_the_same_parameters(tmp_path, line, bf16):
    options = {"num_train_epochs": 2, "save_strategy": "no", "max_grad_norm": 0.5, "bf16": bf16}
    before, _ = train(tmp_path / "before", torch.optim.AdamW, line, **options)
    with judged() as verdict:
        after, _ = train(tmp_path / "after", instep.torch.AdamW, line, **options)
    assert verdict.steps == 8
    assert_close_runs(before, after, bf16, "c_attn.bias")


@pytest.mark.parametrize("bf16", [False, True], ids=["32", "bf16-mixed"])
def test_transformers_resumes_with_the_bits_of_an_uninterrupted_run(tmp_path, bf16):
    options = {"max_steps": 6, "save_steps": 3, "bf16": bf16}
    whole = train(tmp_path, instep.torch.AdamW, "class", **options)
    with judged() as verdict:
        resumed = train(tmp_path, instep.torch.AdamW, "class", str(tmp_path / "checkpoint-3"), **options)
    assert verdict.steps == 3
    assert has_bits_of(resumed, whole)
    assert all(value == 6 for (_, name), value in resumed[1].items() if name == "step")


def run_accelerate(adamw, precision, folder, resume=False) -> tuple[dict[str, Tensor], dict[tuple[int, str], Tensor]]:
    """Trains two epochs of two steps each, and saves between them. With ``resume``, loads this checkpoint and trains
    only the second epoch.
    """
    accelerate.state.AcceleratorState._reset_state(True)  # It is one for the process, with one precision.
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    net = model()
    optimizer = adamw(net.parameters(), **HYPER)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, DataLoader(Bytes(), batch_size=4), schedule)
    if resume:
        accelerator.load_state(str(folder))
    for epoch in range(1 if resume else 0, 2):
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(**batch).loss)
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(str(folder))
    return values(accelerator.unwrap_model(net)), states(optimizer)


@pytest.mark.parametrize("adamw", [instep.torch.AdamW, partial(FusedOptimizer, optimizer="adamw")], ids=["class", "key"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_accumulates_clips_schedules_and_resumes(tmp_path, precision, adamw):
    before, _ = run_accelerate(torch.optim.AdamW, precision, tmp_path / "before")
    with judged() as verdict:
        after = run_accelerate(adamw, precision, tmp_path / "after")
        resumed = run_accelerate(adamw, precision, tmp_path / "after", resume=True)
    assert verdict.steps == 4 + 2
    assert_close_runs(before, after[0], precision == "bf16", "c_attn.bias")
    assert has_bits_of(resumed, after)
