"""The Trainer of transformers: a step that is searched exactly as it will be trained.

You learn how a workload is taken from a Trainer that you have already, with its loss, batches,
accumulation and clipping, and that the policy then needs one line: `policy.apply_hf(model)`.
Install `pip install '.[trainer]'`, and type:

    sac-search studies/trainer_transformers.py --device cpu --budget-gb 0.02
    python studies/trainer_transformers.py studies/trainer_transformers-0.02gib/policy.py

Without the policy's path the second command trains the plain model. Then put your model, data and
arguments into `make_trainer`: nothing else here is about this model.
"""

from __future__ import annotations

import sys
import tempfile
from types import ModuleType

import torch
from _text import VOCABULARY, text_batch
from _training import load_policy, losses_of, workload_of

from sac_search import Workload
from sac_search.workload import require

transformers = require("transformers", extra="trainer")
require("accelerate", extra="trainer")

BATCH_SIZE = 8
ACCUMULATION = 1  # batches in a step
SEQUENCE_LENGTH = 128
STEPS = 5


def make_trainer(batch_size: int = BATCH_SIZE, *, use_cpu: bool = False) -> transformers.Trainer:
    """Returns the Trainer of a small Llama on byte-level text."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE_LENGTH,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,  # a cache would grow again when a layer is recomputed
    )
    samples = text_batch(batch_size * ACCUMULATION * STEPS, SEQUENCE_LENGTH)
    return transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=transformers.TrainingArguments(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=ACCUMULATION,
            learning_rate=1e-3,
            max_steps=STEPS,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=use_cpu,
        ),
        train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in samples],
    )


def workload(device: torch.device, batch_size: int | None = None) -> Workload:
    """Returns the Trainer's own training step."""
    on_cpu = device.type in ("cpu", "meta")
    trainer = make_trainer(batch_size or BATCH_SIZE, use_cpu=on_cpu)
    return workload_of(trainer, sequence_length=SEQUENCE_LENGTH)


def train(policy: ModuleType | None = None, *, use_cpu: bool = False) -> list[float]:
    """Trains a few steps, under the policy if there is one, and returns their losses."""
    trainer = make_trainer(use_cpu=use_cpu)
    if policy is not None:
        policy.apply_hf(trainer.model)  # in your script: import policy; policy.apply_hf(model)
    trainer.train()
    return losses_of(trainer)


if __name__ == "__main__":
    print(train(load_policy(sys.argv[1]) if len(sys.argv) > 1 else None))
