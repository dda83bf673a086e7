"""The lines that README.md gives for each trainer, run as they stand there."""

from __future__ import annotations

import functools
import re
import types
from pathlib import Path
from typing import Any

import pytest
import test_export_frameworks
import torch
from test_export_frameworks import BOTH, LLAMA, checkpointed, export, token_ids, two_tiers
from tiny import Stack, loss_of, recomputed, run, stack, tokens
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import fully_shard

README = Path(__file__).parents[1] / "README.md"
pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of much
process_group = test_export_frameworks.process_group


def read_table() -> dict[str, str]:
    """Returns the code of each row of the table of trainers."""
    head = r"\| your trainer \| the lines \|\n\| --- \| --- \|\n"
    rows = re.search(rf"{head}((?:\|.*\n)+)", README.read_text())
    assert rows is not None
    cells = [row.strip("|").split(" | ", 1) for row in rows[1].splitlines()]
    return {
        name.strip().replace("`", ""): "\n".join(re.findall("`([^`]+)`", code))
        for name, code in cells
    }


LINES = read_table()
OF_OWN_MODELS = (
    *("accelerate", "torchtitan, in its parallelize_fn", "torch.compile", "DDP", "FSDP2"),
    "torch's own function",
)
OF_LLAMA = ("Trainer of transformers", "TRL", "PEFT")
OF_DIFFUSERS = ("diffusers", "diffusers, by its hooks")


def follow(row: str, /, **names: Any) -> dict[str, Any]:
    """Runs the lines of a row, given what they name. Returns all names afterwards."""
    exec(LINES[row], names)  # noqa: S102
    return names


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert any(gradient.any() for gradient in found)
    return [getattr(g, "full_tensor", lambda g=g: g)() for g in found]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def names_of_layers(model: nn.Module) -> list[str]:
    """Returns the names of the checkpointed layers without what wrappers add in front."""
    prefix = re.compile(r"^(module|_orig_mod|base_model\.model)\.")
    return [prefix.sub("", name) for name in checkpointed(model)]


def test_every_row_is_tested() -> None:
    assert set(LINES) == {*OF_OWN_MODELS, *OF_LLAMA, *OF_DIFFUSERS, "Lightning", "timm"}


@pytest.mark.parametrize("name", OF_OWN_MODELS)
def test_own_models(name: str, process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stack, "layers", property(lambda self: self.blocks), raising=False)
    plain = stack()
    expected = gradients(plain, loss_of(plain(tokens())))
    model = stack()
    names: dict[str, Any] = {}
    if name == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        names["accelerator"] = accelerate.Accelerator(cpu=True)
        names["optimizer"] = torch.optim.SGD(model.parameters())
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    names |= {
        "torch": types.SimpleNamespace(
            compile=functools.partial(torch.compile, backend="aot_eager")
        ),
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "fully_shard": functools.partial(fully_shard, mesh=mesh),
        "apply_activation_checkpointing": apply_activation_checkpointing,
    }
    torch._dynamo.reset()
    trained = follow(name, model=model, policy=export(two_tiers(*BOTH)), **names)["model"]
    assert names_of_layers(trained) == list(BOTH)
    assert_equal(gradients(trained, loss_of(trained(tokens()))), expected)


def make_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("name", OF_LLAMA)
def test_hugging_face_models(name: str, tmp_path: Path) -> None:
    model = make_llama()
    names: dict[str, Any] = {}
    options = {"output_dir": str(tmp_path), "max_steps": 1, "use_cpu": True, "report_to": []}
    samples = [{"input_ids": row, "labels": row} for row in token_ids().tolist()]
    if name == "PEFT":
        peft = pytest.importorskip("peft")
        names["config"] = peft.LoraConfig(target_modules=["q_proj"], r=2)
        names["get_peft_model"] = peft.get_peft_model
        plain = make_llama()
        torch.manual_seed(1)
        plain = peft.get_peft_model(plain, names["config"])
        torch.manual_seed(1)
    elif name == "TRL":
        trl, tokenizers = pytest.importorskip("trl"), pytest.importorskip("tokenizers")
        datasets = pytest.importorskip("datasets")
        transformers = pytest.importorskip("transformers")
        words = tokenizers.models.WordLevel({"[UNK]": 0, "[END]": 1}, unk_token="[UNK]")  # noqa: S106
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(words), pad_token="[UNK]", eos_token="[END]",  # noqa: S106
        )  # fmt: skip
        names["data"] = datasets.Dataset.from_list(samples)
        names["args"] = trl.SFTConfig(**options, bf16=False)
        names["SFTTrainer"] = functools.partial(trl.SFTTrainer, processing_class=tokenizer)
        plain = make_llama()
    else:
        pytest.importorskip("accelerate")
        transformers = pytest.importorskip("transformers")
        names["args"] = transformers.TrainingArguments(**options, activation_checkpointing=True)
        names |= {"data": samples, "Trainer": transformers.Trainer}
        plain = make_llama()
    done = follow(name, model=model, policy=export(two_tiers(*LLAMA)), **names)
    if "trainer" in done:
        done["trainer"].train()
        done["trainer"].model.load_state_dict(plain.state_dict())
        done["trainer"].model.zero_grad()
    trained = done["trainer"].model if "trainer" in done else done["model"]
    ids = token_ids()
    assert names_of_layers(trained) == list(LLAMA)
    assert not any(vars(m).get("gradient_checkpointing") for m in trained.modules())
    expected = gradients(plain, plain(input_ids=ids, labels=ids).loss)
    assert_equal(gradients(trained, trained(input_ids=ids, labels=ids).loss), expected)


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    given = {"policy": export(two_tiers(*(f"net.{name}" for name in BOTH)))}
    configure = follow("Lightning", **given)["configure_model"]

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        configure_model = configure

        def __init__(self) -> None:
            super().__init__()
            self.net = stack()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.net(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module = Module()
    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader([tokens()[0]]))  # type: ignore[arg-type]
    assert checkpointed(module) == [f"net.{name}" for name in BOTH]
    module.zero_grad()
    plain = stack()
    expected = gradients(plain, loss_of(plain(tokens())))
    assert_equal(gradients(module, module.training_step(tokens(), 0)), expected)
    # And what the README says of names that begin otherwise.
    assert checkpointed(export(two_tiers(*BOTH)).apply(Module().net)) == list(BOTH)
    with pytest.raises(ValueError, match="apply the policy to what holds this model"):
        given["policy"].apply(Module().net)


@pytest.mark.parametrize("name", OF_DIFFUSERS)
def test_diffusers(name: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    ).train()  # fmt: skip
    inputs = {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([1, 2])}
    latents = torch.linspace(0, 1, 512).reshape(2, 4, 8, 8)
    plain = run(unet, latents, return_dict=False, **inputs)
    policy = export(two_tiers("transformer_blocks.0", "transformer_blocks.1"))
    follow(name, unet=unet, policy=policy)
    applied = run(unet, latents, return_dict=False, **inputs)
    assert recomputed(plain, applied)["aten.gelu.default"] == 2
    assert torch.equal(plain.loss, applied.loss)


def test_timm() -> None:
    try:
        timm = pytest.importorskip("timm")
    except RuntimeError as error:  # torchvision's wheels do not load beside every build of torch
        pytest.skip(f"timm cannot be imported: {error}")
    create = functools.partial(
        timm.create_model, img_size=32, depth=3, embed_dim=32, num_heads=2, num_classes=4
    )
    given = types.SimpleNamespace(create_model=create)
    policy = export(two_tiers(*BOTH))
    done = follow("timm", timm=given, name="vit_tiny_patch16_224", policy=policy)
    images = torch.linspace(0, 1, 6144).reshape(2, 3, 32, 32)
    assert checkpointed(done["model"]) == list(BOTH)
    applied = run(done["model"], images)
    plain = run(policy.remove(done["model"]), images)
    assert recomputed(plain, applied)["aten.gelu.default"] == 2
    assert torch.equal(plain.loss, applied.loss)
