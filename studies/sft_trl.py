"""SFTTrainer of TRL with a LoRA of PEFT: the smallest trained part, on a base that is frozen.

You learn that adapters change what there is to save: the base's weights get no gradients, so its
matmuls need their inputs no more. TRL's loss takes the vocabulary in chunks of 32768 columns, 128
KiB for each token however small the model is, so it holds much of this peak. The policy goes to the
model that TRL has wrapped, and TRL's own checkpointing stays off. Install
`pip install '.[trl]'`, and type:

    sac-search studies/sft_trl.py --device cpu --budget-gb 0.045
    python studies/sft_trl.py studies/sft_trl-0.045gib/policy.py

Without the policy's path the second command trains without it. Then put your model, data, adapters
and arguments into `make_trainer`: nothing else here is about this model.
"""

from __future__ import annotations

import sys
import tempfile
from types import ModuleType

import torch
from _text import text_batch
from _training import load_policy, losses_of, workload_of

from sac_search import Workload
from sac_search.workload import require

datasets = require("datasets", extra="trl")
peft = require("peft", extra="trl")
transformers = require("transformers", extra="trl")
trl = require("trl", extra="trl")

BATCH_SIZE = 4
ACCUMULATION = 1  # batches in a step
SEQUENCE_LENGTH = 64
STEPS = 5


def make_trainer(batch_size: int = BATCH_SIZE, *, use_cpu: bool = False) -> trl.SFTTrainer:
    """Returns the SFTTrainer of a small Llama with adapters, on byte-level text."""
    torch.manual_seed(0)
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # bytes: no vocabulary to download
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=SEQUENCE_LENGTH,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,  # a cache would grow again when a layer is recomputed
    )
    rows = text_batch(batch_size * ACCUMULATION * STEPS, SEQUENCE_LENGTH).tolist()
    texts = [bytes(row).decode(errors="replace") for row in rows]
    return trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear"),
        args=trl.SFTConfig(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=ACCUMULATION,
            max_length=SEQUENCE_LENGTH,
            learning_rate=1e-2,
            max_steps=STEPS,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=use_cpu,
            bf16=False,
            gradient_checkpointing=False,  # the policy takes its place
        ),
    )


def workload(device: torch.device, batch_size: int | None = None) -> Workload:
    """Returns the SFTTrainer's own training step."""
    on_cpu = device.type in ("cpu", "meta")
    trainer = make_trainer(batch_size or BATCH_SIZE, use_cpu=on_cpu)
    return workload_of(trainer, sequence_length=SEQUENCE_LENGTH)


def train(policy: ModuleType | None = None, *, use_cpu: bool = False) -> list[float]:
    """Trains a few steps, under the policy if there is one, and returns their losses."""
    trainer = make_trainer(use_cpu=use_cpu)
    if policy is not None:
        policy.apply_hf(trainer.model)  # in your script: import policy; policy.apply_hf(...)
    trainer.train()
    return losses_of(trainer)


if __name__ == "__main__":
    print(train(load_policy(sys.argv[1]) if len(sys.argv) > 1 else None))
