"""What is said of real searches: of workloads of `studies/` on a CPU, and of a forecast."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from tracing import check_traced, sentences

from sac_search.artifacts import load_result
from sac_search.report import facts
from sac_search.report.explain import explain
from sac_search.study.result import SearchResult

STUDIES = Path(__file__).with_name("studies")
NAMES = sorted(path.name.partition(".")[0] for path in STUDIES.glob("*.db.gz"))
SAVING = "What saving buys"
LIMITS = "What limits it, and what to do"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SearchResult]:
    found = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        packed = (STUDIES / f"{name}.db.gz").read_bytes()
        (folder / "study.db").write_bytes(gzip.decompress(packed))
        found[name] = load_result(folder)
    return found


def test_none_is_missing() -> None:
    assert {"builtin", "gpt2", "llama", "vit", "resnet", "sft", "ssm", "forecast"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_the_studys(results: dict[str, SearchResult], name: str) -> None:
    check_traced(results[name])
    assert len(explain(results[name]).figures) > 30


@pytest.mark.parametrize("name", NAMES)
def test_what_layers_keep_is_less_than_the_peak(
    results: dict[str, SearchResult], name: str
) -> None:
    figures = {figure.name: figure.quantity.value for figure in explain(results[name]).figures}
    assert figures["kept"] > 0 and 0 < figures["share"] < 1


def test_a_loss_that_holds_the_peak_is_found(results: dict[str, SearchResult]) -> None:
    # TRL takes the logits 32768 columns at a time, however small the vocabulary is.
    told = sentences(explain(results["sft"]), LIMITS)
    assert "lies outside the layers" in told[0] and "chunked cross-entropy" in told[0]


def test_logits_of_a_large_vocabulary_are_found(results: dict[str, SearchResult]) -> None:
    # 760 million parameters and 32768 words on a card of 24 GB, forecast.
    told = sentences(explain(results["forecast"]), LIMITS)
    assert told[0].startswith("What the model's output and the loss add to the forward pass is 2.1")
    assert "which holds the peak (forecast)" in told[0] and "chunked cross-entropy" in told[0]
    assert "(measured)" not in facts.to_text(explain(results["forecast"]))


def test_the_peak_is_taken_apart_and_gradients_that_are_left_are_found(
    results: dict[str, SearchResult],
) -> None:
    # Its step ends with zero_grad(set_to_none=False).
    result = results["ssm"]
    assert result.best is not None and result.best.measurement is not None
    figures = explain(result).figures
    parts = [f.quantity.value for f in figures if f.name.startswith("part ")]
    assert len(parts) == 6
    assert sum(parts) == pytest.approx(result.best.measurement.allocated_bytes, rel=0.002)
    [told] = [text for text in sentences(explain(result), LIMITS) if "zero_grad" in text]
    assert told.startswith("When the step begins 1.5 MiB of gradients are alive")


@pytest.mark.parametrize("name", ["builtin", "gpt2", "llama", "resnet", "vit"])
def test_a_small_loss_is_not_blamed(results: dict[str, SearchResult], name: str) -> None:
    assert "cross-entropy" not in facts.to_text(explain(results[name]))


@pytest.mark.parametrize("name", ["builtin", "vit"])
def test_state_that_is_most_of_the_peak_is_found(
    results: dict[str, SearchResult], name: str
) -> None:
    told = " ".join(sentences(explain(results[name]), LIMITS))
    assert "beyond the reach of checkpointing" in told and "8-bit" in told


@pytest.mark.parametrize("name", ["llama", "sft"])
def test_where_saving_pays_in_no_layer_it_is_said(
    results: dict[str, SearchResult], name: str
) -> None:
    assert any(
        text.startswith("Saving pays in no") for text in sentences(explain(results[name]), SAVING)
    )


def test_of_many_kinds_of_layers_the_weightiest_are_told(results: dict[str, SearchResult]) -> None:
    told = sentences(explain(results["resnet"]), SAVING)
    alone = [text for text in told if "left alone: checkpointing" in text]
    assert len(alone) == 3
    assert "10.1 MiB less" in alone[0] and "5.1 MiB less" in alone[1]
