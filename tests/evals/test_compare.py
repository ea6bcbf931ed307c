"""The comparison from end to end on a tiny model, and transformers' side of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdec.testing import reference_generate, tiny_llama, tiny_tokenizer
from specdec_evals.arms import TransformersArm, faster_transformers
from specdec_evals.compare import encode, main, parse_arguments
from specdec_evals.provenance import provenance


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_transformers_arm_times_the_tokens_that_generate_returns() -> None:
    model = tiny_llama()
    prompt = list(range(10, 30))
    answer = TransformersArm(model, "transformers", "fp32").answer(prompt, 12)
    assert list(answer.token_ids) == list(reference_generate(model, prompt, 12))
    assert answer.start < answer.first < answer.last
    assert answer.num_decode_passes == 11
    assert answer.tokens_per_second == pytest.approx(11 / (answer.last - answer.first))


def test_single_token_has_no_speed() -> None:
    answer = TransformersArm(tiny_llama(), "transformers", "fp32").answer([4, 5], 1)
    assert len(answer.token_ids) == 1
    assert answer.tokens_per_second is None


def test_faster_dtype_is_the_one_with_the_larger_median(tiny_folder: Path) -> None:
    prompts = [[5, 6, 7], [8, 9, 10]]
    arm, speeds = faster_transformers(tiny_folder, prompts, dtypes=("fp32", "bf16"), max_tokens=8)
    assert speeds.keys() == {"fp32", "bf16"}
    assert speeds[arm.dtype] == max(speeds.values())
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16}[arm.dtype]
    assert arm.model.dtype == expected


def test_encode_uses_the_chat_template_if_there_is_one() -> None:
    tokenizer = tiny_tokenizer()
    chat = tokenizer.decode(encode(tokenizer, "hello"))
    assert chat.count("<|im_start|>") == 2
    tokenizer.chat_template = None
    assert tokenizer.decode(encode(tokenizer, "hello")) == "hello"


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments([]).max_tokens == 256
    with pytest.raises(SystemExit):
        parse_arguments(["--rounds", "0"])
    assert "--rounds must be at least 1" in capsys.readouterr().err


def test_unreadable_prompts_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none.jsonl")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_provenance_names_command_machine_and_versions() -> None:
    facts = provenance()
    assert facts["command"]
    assert facts["machine"]["cores"] >= 1
    assert facts["versions"]["torch"] == torch.__version__
    json.dumps(facts)


def test_comparison_end_to_end(tiny_folder: Path, tmp_path: Path) -> None:
    """fp32: all arms give the same ids, and plain decoding has acceptance length 1."""
    output = tmp_path / "report.json"
    arguments = [
        *("--model", str(tiny_folder), "--dtype", "fp32", "--transformers-dtype", "fp32"),
        *("--limit", "2", "--max-tokens", "10", "--output", str(output)),
    ]
    assert main(arguments) == 0
    report = json.loads(output.read_text())
    arms = {arm["name"]: arm for arm in report["summary"]["arms"]}
    assert list(arms) == ["transformers", "plain", "ngram fixed", "ngram auto"]
    assert arms["plain"]["acceptance_length"] == 1.0
    assert arms["ngram fixed"]["acceptance_length"] >= 1.0
    assert {arm["same_as_first"] for arm in arms.values()} == {2}
    assert len(report["samples"]) == 4 * 2
    assert report["provenance"]["versions"]["torch"] == torch.__version__
