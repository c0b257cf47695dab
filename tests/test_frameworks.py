"""Accelerate, Transformers and Lightning drive our optimizers: every step equals the oracle, every resumed run the
unbroken one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import IS_INTERPRETED, Runner
from problem import assert_same_bits
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import tritonamp
from tritonamp.testing import expect

os.environ["HF_HUB_OFFLINE"] = "1"
if IS_INTERPRETED:
    pytest.skip("what is tested here is not in the kernels: once is enough", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about torch's deprecations, and about their own
    import accelerate
    import lightning
    import transformers
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from lightning.pytorch.plugins import MixedPrecision

pytestmark = pytest.mark.filterwarnings("ignore")

# Optimizers with as much state as there is, and options that a checkpoint has to bring along.
MAKERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda params, **options: tritonamp.SGD(params, lr=0.05, momentum=0.9, max_norm=0.5, **options),
    "AdamW": lambda params, **options: tritonamp.AdamW(params, lr=0.01, amsgrad=True, max_norm=0.5, **options),
}
X, Y = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def halving(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def assert_same_run(a: Any, b: Any) -> None:
    """Parameters, state, loss scale and learning rate of two optimizers are the same."""
    states = []
    for optimizer in (a, b):
        state_dict = optimizer.state_dict()
        tensors = [param for group in optimizer.param_groups for param in group["params"]]
        states.append(tensors + [of[key] for _, of in sorted(state_dict["state"].items()) for key in sorted(of)])
    assert_same_bits(*states)
    assert a.loss_scale.state_dict() == b.loss_scale.state_dict()
    assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"]


class Watch:
    """Compares every step of an optimizer with the oracle, whoever calls it, and counts them."""

    def __init__(self, optimizer: Any) -> None:
        self.steps = 0
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

        def watched() -> Any:
            loss = closure() if closure is not None else None
            outer = getattr(optimizer, "grad_scale", None)  # of a stock scaler
            options = {} if outer is None else {"scale": float(outer)}
            with torch.no_grad():
                self.expectation = expect(optimizer, **options)
            return loss

        return (optimizer, watched), {}

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.expectation.check()
        self.steps += 1


SCALERS = pytest.mark.parametrize("make_scaler", [torch.amp.GradScaler, tritonamp.GradScaler], ids=["stock", "ours"])


# Accelerate.


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    options = getattr(request, "param", {})
    yield accelerate.Accelerator(cpu=True, **options)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


ACCELERATORS = [{}, {"mixed_precision": "bf16"}, {"gradient_accumulation_steps": 2}]


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=str, indirect=True)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("clips", [False, True], ids=["max_norm", "clip_grad_norm_"])
def test_accelerate(runner: Runner, accelerator: Any, name: str, clips: bool) -> None:
    model = make_model()
    inner = MAKERS[name](model.parameters(), backend=runner.backend)
    watch = Watch(inner)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, inner, loader, halving(inner))
    assert optimizer.optimizer is inner
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            if clips and accelerator.sync_gradients:  # on top of max_norm: the lower limit holds
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            assert not accelerator.optimizer_step_was_skipped
    n = 6 // accelerator.gradient_accumulation_steps
    assert watch.steps == n
    assert inner.param_groups[0]["lr"] == inner.defaults["lr"] * 0.5**n
    assert inner.loss_scale.get_scale() == 65536.0  # never armed
    if clips:
        assert inner.grad_norm.item() <= 0.1 * (1 + 1e-5)


def test_accelerate_with_our_loss_scale(runner: Runner, accelerator: Any) -> None:
    """The optimizer's own backward() in place of accelerator.backward(), and overflows where Accelerate sees none."""
    model = make_model()
    inner = tritonamp.SGD(model.parameters(), lr=0.1, loss_scale="dynamic", backend=runner.backend)
    watch = Watch(inner)
    model, optimizer = accelerator.prepare(model, inner)
    for step in range(3):
        optimizer.optimizer.backward(nn.functional.cross_entropy(model(X), Y) * (torch.inf if step == 1 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        assert inner.step_was_skipped == (step == 1)
    assert watch.steps == 3 and inner.loss_scale.get_scale() == 32768.0
    accelerator.backward(nn.functional.cross_entropy(model(X), Y))
    with pytest.raises(RuntimeError, match="nothing was scaled since the last step"):
        optimizer.step()


@SCALERS
@pytest.mark.parametrize("unscales", [False, True], ids=["in step()", "by clip_grad_norm_"])
def test_accelerate_under_its_scaler(runner: Runner, accelerator: Any, make_scaler: Any, unscales: bool) -> None:
    """As with float16 on a GPU; on CPUs Accelerate refuses it, so that its parts are put together here."""
    model = make_model()
    inner = tritonamp.SGD(model.parameters(), lr=0.1, max_norm=0.5, backend=runner.backend)
    watch = Watch(inner)
    scaler = make_scaler("cpu", init_scale=8.0)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    scheduler = AcceleratedScheduler(halving(inner), optimizer)
    for step in range(3):
        loss = nn.functional.cross_entropy(model(X), Y) * (torch.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(inner)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        # The scaler always calls a fused optimizer, which decides on the device: Accelerate takes no step for skipped.
        assert not optimizer.step_was_skipped
        assert inner.step_was_skipped == (step == 1)
    assert watch.steps == 3 and scaler.get_scale() == 4.0
    scaler.scale(nn.functional.cross_entropy(model(X), Y)).backward()
    with pytest.raises(RuntimeError, match="under a GradScaler"):
        inner.backward(nn.functional.cross_entropy(model(X), Y))


@pytest.mark.parametrize("accelerator", [{"mixed_precision": "bf16"}], ids=str, indirect=True)
@pytest.mark.parametrize("name", MAKERS)
def test_accelerate_resumes(runner: Runner, accelerator: Any, name: str, tmp_path: Path) -> None:
    def start() -> Any:
        model = make_model()
        inner = MAKERS[name](
            model.parameters(), loss_scale=tritonamp.LossScale(8.0, growth_interval=2), backend=runner.backend
        )
        accelerator.free_memory()
        return accelerator.prepare(model, inner, halving(inner))

    def train(model: Any, optimizer: Any, scheduler: Any) -> None:
        for step in range(3):
            loss = nn.functional.cross_entropy(model(X), Y) * (torch.inf if step == 0 else 1.0)
            optimizer.optimizer.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    unbroken = start()
    train(*unbroken)
    accelerator.save_state(str(tmp_path))
    train(*unbroken)
    resumed = start()
    accelerator.load_state(str(tmp_path))
    train(*resumed)
    ours, theirs = (optimizer.optimizer for _, optimizer, _ in (resumed, unbroken))
    assert_same_run(ours, theirs)
    assert ours.loss_scale.get_scale() == 8.0  # 8, 4, 8 and again
    assert ours.param_groups[0]["lr"] == ours.defaults["lr"] * 0.5**6


# Transformers.


def make_trainer(folder: Path, runner: Runner, loss_scale: str = "auto", **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=8, n_positions=6, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    optimizer = tritonamp.AdamW(
        model.parameters(), lr=0.01, max_norm=0.5, loss_scale=loss_scale, backend=runner.backend
    )
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        save_steps=2,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
        **options,
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(48).view(8, 6) % 8]
    scheduler = halving(optimizer)
    return transformers.Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, scheduler)), optimizer


OPTIONS = [{"max_grad_norm": 0.0}, {"max_grad_norm": 0.1}, {"bf16": True}, {"gradient_accumulation_steps": 2}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_transformers_trainer(runner: Runner, options: dict[str, Any], tmp_path: Path) -> None:
    trainer, optimizer = make_trainer(tmp_path, runner, **options)
    watch = Watch(optimizer)
    trainer.train()
    assert watch.steps == 4
    assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5**4
    assert (optimizer.grad_norm.item() <= 0.1 * (1 + 1e-5)) == (options.get("max_grad_norm") == 0.1)


def test_transformers_trainer_resumes(runner: Runner, tmp_path: Path) -> None:
    trainer, unbroken = make_trainer(tmp_path, runner)
    trainer.train()
    trainer, resumed = make_trainer(tmp_path, runner)
    watch = Watch(resumed)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert watch.steps == 2
    assert_same_run(resumed, unbroken)


def test_transformers_trainer_scales_no_loss(runner: Runner, tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, runner, loss_scale="dynamic")
    with pytest.raises(RuntimeError, match="nothing was scaled since the last step"):
        trainer.train()


# Lightning.


class Module(lightning.LightningModule):
    """Trains with the optimizer that is made of its parameters."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make, self.model = make, make_model()

    def configure_optimizers(self) -> Any:
        self.optimizer = self.make(self.parameters())
        self.watch = Watch(self.optimizer)
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": halving(self.optimizer), "interval": "step"}}

    def training_step(self, batch: list[Tensor], at: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)


class ManualModule(Module):
    """Scales the loss, looks at the unscaled gradients, steps, and reads: all through Lightning's wrapper."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], at: int) -> None:
        wrapper: Any = self.optimizers()
        assert wrapper is not self.optimizer and isinstance(wrapper, type(self.optimizer))
        step = self.global_step
        loss = super().training_step(batch, at)
        wrapper.backward(loss * (torch.inf if step % 3 == 1 else 1.0))
        if step % 2 == 0:
            wrapper.unscale_()
        wrapper.step()
        assert wrapper.step_was_skipped == self.optimizer.step_was_skipped == (step % 3 == 1)
        assert int(wrapper.skipped_steps) == int(self.optimizer.skipped_steps)
        wrapper.zero_grad()
        self.lr_schedulers().step()  # type: ignore[union-attr]


def make_lightning(folder: Path, **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1)],
        **{"max_steps": 6, **options},
    )


def batches() -> Any:
    """Three times the same: where in an epoch a resumed run of Lightning goes on is its own affair."""
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X[:8].repeat(3, 1), Y[:8].repeat(3)), batch_size=8
    )


OPTIONS_OF_LIGHTNING = [
    {},
    {"precision": "bf16-mixed"},
    {"gradient_clip_val": 0.1},  # on top of max_norm: the lower limit holds
    {"accumulate_grad_batches": 3, "max_steps": 2},
]


@pytest.mark.parametrize("options", OPTIONS_OF_LIGHTNING, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_lightning(runner: Runner, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    module = Module(lambda params: MAKERS[name](params, backend=runner.backend))
    trainer = make_lightning(tmp_path, **options)
    trainer.fit(module, batches())
    assert module.watch.steps == trainer.max_steps
    assert module.optimizer.param_groups[0]["lr"] == module.optimizer.defaults["lr"] * 0.5**trainer.max_steps
    if "gradient_clip_val" in options:
        assert module.optimizer.grad_norm.item() <= 0.1 * (1 + 1e-5)


@SCALERS
def test_lightning_under_its_scaler(runner: Runner, make_scaler: Any, tmp_path: Path) -> None:
    module = Module(lambda params: tritonamp.SGD(params, lr=0.1, max_norm=0.5, backend=runner.backend))
    scaler = make_scaler("cpu", init_scale=2.0**24)
    make_lightning(tmp_path, plugins=MixedPrecision("16-mixed", "cpu", scaler)).fit(module, batches())
    assert module.watch.steps == 6
    skipped = int(module.optimizer.skipped_steps)
    assert skipped > 0 and scaler.get_scale() == 2.0 ** (24 - skipped)


@SCALERS
def test_lightning_clips_no_scaled_gradients(runner: Runner, make_scaler: Any, tmp_path: Path) -> None:
    """Its clipping would come ahead of the unscaling in step(): it refuses, and max_norm does it."""
    module = Module(lambda params: tritonamp.SGD(params, lr=0.1, backend=runner.backend))
    plugin = MixedPrecision("16-mixed", "cpu", make_scaler("cpu"))
    with pytest.raises(RuntimeError, match="SGD, does not allow for gradient clipping"):
        make_lightning(tmp_path, plugins=plugin, gradient_clip_val=0.5).fit(module, batches())


@pytest.mark.parametrize("name", MAKERS)
def test_lightning_by_hand(runner: Runner, name: str, tmp_path: Path) -> None:
    module = ManualModule(lambda params: MAKERS[name](params, backend=runner.backend))
    make_lightning(tmp_path).fit(module, batches())
    assert module.watch.steps == 6
    assert module.optimizer.loss_scale.get_scale() == 16384.0  # two overflows


@SCALERS
def test_lightning_takes_one_scale(runner: Runner, make_scaler: Any, tmp_path: Path) -> None:
    module = ManualModule(lambda params: tritonamp.SGD(params, lr=0.1, backend=runner.backend))
    plugin = MixedPrecision("16-mixed", "cpu", make_scaler("cpu"))
    before = [param.detach().clone() for param in module.parameters()]
    with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
        make_lightning(tmp_path, plugins=plugin).fit(module, batches())
    assert_same_bits(list(module.parameters()), before)


@pytest.mark.parametrize("kind", [Module, ManualModule])
@pytest.mark.parametrize("name", MAKERS)
def test_lightning_resumes(runner: Runner, kind: Any, name: str, tmp_path: Path) -> None:
    unbroken, resumed = (kind(lambda params: MAKERS[name](params, backend=runner.backend)) for _ in range(2))
    make_lightning(tmp_path).fit(unbroken, batches())
    (checkpoint,) = tmp_path.glob("*step=3.ckpt")
    make_lightning(tmp_path).fit(resumed, batches(), ckpt_path=checkpoint)
    assert resumed.watch.steps == 3
    assert_same_run(resumed.optimizer, unbroken.optimizer)


def test_lightning_loads_through_its_wrapper(runner: Runner, tmp_path: Path) -> None:
    module = ManualModule(lambda params: MAKERS["AdamW"](params, backend=runner.backend))
    make_lightning(tmp_path).fit(module, batches())
    wrapper: Any = lightning.pytorch.core.optimizer.LightningOptimizer(module.optimizer)
    fresh: Any = lightning.pytorch.core.optimizer.LightningOptimizer(
        MAKERS["AdamW"](make_model().parameters(), backend=runner.backend)
    )
    fresh.load_state_dict(wrapper.state_dict())
    ours, theirs = (list(optimizer.state.values()) for optimizer in (fresh.optimizer, module.optimizer))
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_bits(list(mine.values()), list(other.values()))
    assert fresh.optimizer.loss_scale.state_dict() == module.optimizer.loss_scale.state_dict()
