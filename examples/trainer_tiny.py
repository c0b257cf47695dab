"""A tiny language model with Hugging Face's Trainer, which learns to go on with arithmetic progressions modulo 16."""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
    set_seed,
)

import tritonamp

STEPS = 400


def progressions() -> list[dict[str, torch.Tensor]]:
    """Return all progressions of 12 tokens with a difference of 1 to 5."""
    rows = [(start + step * torch.arange(12)) % 16 for start in range(16) for step in range(1, 6)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> int:
    """Train, print what happened, and return the exit status: 0 if the model goes on with the progressions."""
    set_seed(0)
    torch.set_num_threads(1)  # small as the network is, and the same result on any number of cores
    config = GPT2Config(vocab_size=16, n_positions=12, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    optimizer = tritonamp.AdamW(model.parameters(), lr=3e-3, max_norm=1.0)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=STEPS // 10, num_training_steps=STEPS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            max_grad_norm=0.0,  # max_norm does it, in the same launch
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=50,
            save_strategy="no",
            report_to="none",
        )
        trainer = Trainer(model, arguments, train_dataset=progressions(), optimizers=(optimizer, scheduler))
        trainer.train()

    rows = torch.stack([row["input_ids"] for row in progressions()]).to(model.device)
    with torch.no_grad():
        guesses = model(rows).logits[:, 1:-1].argmax(-1)  # two tokens tell the difference
    right = (guesses == rows[:, 2:]).float().mean().item()
    print(f"next token right: {right:.1%}; last gradient norm {optimizer.grad_norm.item():.3f}")
    return 0 if right > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
