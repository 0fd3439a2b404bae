"""One layer's prediction: what the command prints, which cases it knows, what MXFP8 costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mok_ref.bench.cases import CASES
from mok_ref.bench.links_layer import BF16_CASES
from mok_ref.planner.layer_prediction import case_of, main, predict_layer

MEASURED = Path(__file__).parents[1] / "docs" / "results" / "mxfp8_h200.json"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_the_output_says_what_was_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    heading, times = printed(capsys, "qwen3:mxfp8", "--weights", "held", "--mode", "bursts")
    assert heading == (
        "qwen3: T 8192 H 2048 I 768 E 128 K 8, 1 x h200, forward, mxfp8, save all, weights held, "
        "bursts"
    )
    assert times.endswith("no transfers between ranks")  # one rank has none that could be hidden
    asked = ("--ranks", "2", "--direction", "backward", "--dw-dtype", "float32")
    heading, times = printed(capsys, "512x256x128x8x2", *asked)
    assert heading == (
        "512x256x128x8x2: T 512 H 256 I 128 E 8 K 2, 2 x h200, backward, bf16, save all, "
        "dW float32, sustained"
    )
    assert times.endswith("% of transfers hidden")


@pytest.mark.parametrize("suffix", ["", ":mxfp8"])
@pytest.mark.parametrize("name", sorted({*CASES, *(case.name for case in BF16_CASES)}))
def test_every_case_of_the_benchmarks_is_known(name: str, suffix: str) -> None:
    case = case_of(name + suffix)
    assert case["name"] == name and case["dtype"] == (suffix[1:] or "bf16")


@pytest.mark.parametrize("text", ["dsv4", "1x2x3", "qwen3:fp4", "qwen3:", "1x2x3x4x5x6"])
def test_other_cases_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([text])
    assert f"perhaps with :mxfp8, got {text!r}" in capsys.readouterr().err


def test_a_case_of_mxfp8_is_predicted_as_such() -> None:
    case = CASES["qwen3"]
    assert predict_layer(case.as_mxfp8()).seconds == predict_layer(case, dtype="mxfp8").seconds
    with pytest.raises(ValueError, match="dtype must be the case's own, mxfp8, or left out"):
        predict_layer(case.as_mxfp8(), dtype="bf16")


@pytest.mark.parametrize(
    ("option", "value"),
    [("save", "some"), ("mode", "slow"), ("dw_dtype", "fp8"), ("weights", "yes")],
)
def test_wrong_words_are_refused(option: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be one of .*, got {value!r}"):
        predict_layer(CASES["qwen3"], **{option: value})


def measured() -> list[dict[str, Any]]:
    return json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", measured(), ids=lambda row: row["case"])
def test_mxfp8_is_slower_where_it_was_measured_to_be(row: dict[str, Any]) -> None:
    """The order of bf16 and MXFP8 steps, weights held and not, is that of the report."""

    def ms(dtype: str, weights: str) -> float:
        case = CASES[row["case"]]
        options = {"save": "none", "mode": "bursts", "weights": weights}
        return predict_layer(case, dtype=dtype, **options).seconds * 1e3

    times = row["ms"]
    bf16, held, fresh = ms("bf16", "held"), ms("mxfp8", "held"), ms("mxfp8", "not held")
    assert (held > bf16) == (times["mxfp8 step, weights held"] > times["bf16 step"])
    assert fresh > max(held, bf16) and times["mxfp8 step"] > times["bf16 step"]


def test_only_mxfp8_pays_for_quantisation() -> None:
    case = CASES["qwen3"]
    plain = predict_layer(case, weights="held").head
    assert predict_layer(case, weights="not held").head == plain
    held = predict_layer(case, dtype="mxfp8", weights="held").head
    fresh = predict_layer(case, dtype="mxfp8", weights="not held").head
    back = predict_layer(case, dtype="mxfp8", direction="backward").head
    assert plain < held < fresh and back == held  # dy has as many elements as x
