"""FusedOptimizer under accelerate and in transformers' Trainer, on models made on the spot."""

import pytest
import torch
from torch.utils.data import Dataset

from instep.torch import FusedOptimizer

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


class Bytes(Dataset):
    """Yields pieces of this file."""

    def __init__(self) -> None:
        self.text = torch.frombuffer(bytearray(open(__file__, "rb").read()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.text[index * 8 : index * 8 + 16]
        return {"input_ids": piece, "labels": piece}


def model() -> torch.nn.Module:
    """Returns a GPT-2 of two thin layers."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


def train(folder, make, **options) -> dict[str, torch.Tensor]:
    """Trains with transformers, and returns the parameters."""
    net = model()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(net, arguments, train_dataset=Bytes(), optimizers=(make(net.parameters()), None))
    trainer.train(resume_from_checkpoint=options.pop("resume", None))
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def ours(params):
    return FusedOptimizer(params, "adamw", lr=1e-3, weight_decay=0.01)


def theirs(params):
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01)


@pytest.mark.parametrize("bf16", [False, True], ids=["32", "bf16-mixed"])
def test_transformers_trains_to_the_same_parameters(tmp_path, bf16):
    options = {"num_train_epochs": 2, "save_strategy": "no", "max_grad_norm": 0.5, "bf16": bf16}
    mine, other = train(tmp_path / "ours", ours, **options), train(tmp_path / "theirs", theirs, **options)
    for name, value in other.items():
        if bf16 and name.endswith("c_attn.bias"):
            continue  # Attention does not depend on the keys' bias, whose gradient is all rounding in 16 bits.
        assert torch.allclose(mine[name], value, rtol=1e-4, atol=2e-4 if bf16 else 1e-5), name


def test_transformers_resumes_from_its_checkpoint(tmp_path):
    whole = train(tmp_path / "whole", ours, max_steps=8, save_strategy="no")
    train(tmp_path / "part", ours, max_steps=4, save_steps=4)
    net = model()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "part"),
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
        max_steps=8,
        save_strategy="no",
    )
    trainer = transformers.Trainer(net, arguments, train_dataset=Bytes(), optimizers=(ours(net.parameters()), None))
    trainer.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-4"))
    assert float(trainer.optimizer.state_dict()["state"][0]["step"]) == 8
    for name, value in net.state_dict().items():
        assert value.shape == whole[name].shape and torch.isfinite(value).all()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_accumulates_clips_and_schedules(tmp_path, precision):
    results = []
    for make in (ours, theirs):
        accelerate.state.AcceleratorState._reset_state(True)  # It is one for the process, with one precision.
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        net = model()
        optimizer = make(net.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        loader = torch.utils.data.DataLoader(Bytes(), batch_size=4)
        net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(**batch).loss)
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.save_state(str(tmp_path))
        accelerator.load_state(str(tmp_path))
        results.append({name: value.detach().clone() for name, value in accelerator.unwrap_model(net).state_dict().items()})
    for name, value in results[1].items():
        assert torch.allclose(results[0][name], value, rtol=1e-4, atol=1e-5), name
