"""Workloads that need no Python: made from a config file of transformers, or a name of timm's."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sac_search import cli
from sac_search.errors import UsageError, WorkloadError, WorkloadNotFound
from sac_search.ready import find_factory
from sac_search.recipe import Autocast, Library, OptimizerName, Precision, Recipe, parse_recipe
from sac_search.workload import build_workload, canonical_spec

CPU = torch.device("cpu")
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 64,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
    },
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
    },
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 16,
        "patch_size": 8,
    },
}


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / f"{request.param}.json"
    path.write_text(json.dumps(CONFIGS[request.param]))
    return path


@pytest.mark.parametrize("config", CONFIGS, indirect=True)
@pytest.mark.parametrize("query", ["", "?autocast=bf16", "?dtype=bf16&optimizer=sgd"])
def test_a_config_is_a_training_step(config: Path, query: str) -> None:
    workload = build_workload(find_factory(f"hf:{config}{query}"), CPU, 2)

    assert math.isfinite(float(workload.run_step()))
    workload.run_loss().backward()
    assert sum(p.grad is not None for p in workload.parameters()) > 10
    dtype = torch.bfloat16 if "dtype" in query else torch.float32
    assert {p.dtype for p in workload.parameters()} == {dtype}
    assert isinstance(workload.optimizer, torch.optim.SGD if "sgd" in query else torch.optim.AdamW)
    assert workload.batch_size == 2
    assert getattr(workload.model.config, "use_cache", False) is False


@pytest.mark.parametrize("config", ["gpt2"], indirect=True)
def test_the_sequence_is_as_long_as_asked(config: Path) -> None:
    workload = build_workload(find_factory(f"hf:{config}?sequence_length=5"), CPU, 3)
    assert (workload.sequence_length, workload.batch_size) == (5, 3)
    assert workload.next_batch()["input_ids"].shape == (3, 5)


@pytest.mark.parametrize("config", ["gpt2"], indirect=True)
def test_the_command_line_takes_a_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["trace", "--hf-config", str(config), "--batch-size", "2", "--device", "cpu"]
    assert cli.main(arguments) == 0
    assert "2 layers (transformer.h.0 … transformer.h.1)" in capsys.readouterr().out


RECIPES = [
    Recipe(library=Library.HF, model="llama.json"),
    Recipe(library=Library.HF, model="a?b%20.json", dtype=Precision.BF16, lora_rank=8),
    Recipe(library=Library.TIMM, model="resnet50", autocast=Autocast.FP16, image_size=64),
    Recipe(library=Library.HF, model="x", optimizer=OptimizerName.NONE, sequence_length=7),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.spec)
def test_a_recipe_is_read_from_its_own_text(recipe: Recipe) -> None:
    assert parse_recipe(recipe.spec) == recipe


def test_other_settings_are_another_workload(tmp_path: Path) -> None:
    recipe = Recipe(library=Library.HF, model=str(tmp_path / "c.json"))
    other = replace(recipe, dtype=Precision.BF16)
    assert canonical_spec(recipe.spec) != canonical_spec(other.spec)


@pytest.mark.parametrize("spec", ["train.py", "train.py:factory", "package.module:factory"])
def test_files_and_modules_are_no_recipes(spec: str) -> None:
    assert parse_recipe(spec) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:", "names no model"),
        ("hf:c.json?dtype=fp12", "dtype is 'fp12'; it must be one of bf16, fp16, fp32"),
        ("hf:c.json?colour=red", "there is no 'colour'"),
        ("hf:c.json?lora_rank=many", "must be a whole number"),
        ("hf:c.json?lora_rank=0", "lora_rank is 0; it must be 1 or more"),
        ("timm:resnet50?sequence_length=5", "take images"),
    ],
)
def test_what_cannot_be_is_told(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_recipe(spec)


def test_a_config_that_is_not_there_or_none(tmp_path: Path) -> None:
    with pytest.raises(WorkloadNotFound, match="there is no file"):
        find_factory(f"hf:{tmp_path / 'missing.json'}")
    for text in ("[", "[]", "{}"):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(UsageError, match=r"is not JSON|names no model_type"):
            find_factory(f"hf:{tmp_path / 'c.json'}")
    (tmp_path / "c.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UsageError, match="no-such-model"):
        find_factory(f"hf:{tmp_path / 'c.json'}")


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_without_timm_the_command_to_type_is_told() -> None:
    with pytest.raises(WorkloadError, match=r"pip install"):
        find_factory("timm:resnet50")


@pytest.mark.parametrize("config", ["gpt2"], indirect=True)
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_train_alone(config: Path) -> None:
    workload = build_workload(find_factory(f"hf:{config}?lora_rank=2"), CPU, 2)
    workload.run_step()
    trained = [n for n, p in workload.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
