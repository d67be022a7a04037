"""The command ``dspark generate``, over random weights in a folder: text, statistics, errors."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from conformance.fixtures.tiny_models import DRAFT, randomise
from dspark import cli, dispatch
from dspark.model.checkpoint import save_draft
from dspark.model.draft import DSparkDraftModel
from dspark.runtime import generate as generating
from dspark.runtime.generate import ProgressBar, fallbacks, report
from dspark.runtime.inkling_config import InklingConfig
from dspark.runtime.statistics import WorkerStats
from dspark.runtime.target import TinyInkling


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``target/`` and ``draft/`` whose ids are bytes."""
    folder = tmp_path_factory.mktemp("model")
    config = InklingConfig(
        hidden_size=64, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position=160
    )
    target = TinyInkling(config)
    randomise(target, "generate/target")
    target.save(folder / "target")
    shape = DRAFT.to_config() | {"vocab_size": 258, "mask_token_id": 300, "max_position_embeddings": 160}
    draft = DSparkDraftModel(type(DRAFT).from_config(shape), config.target_config())
    randomise(draft, "generate/draft")
    draft.bind(target.embed_tokens, target.lm_head)
    save_draft(draft, folder / "draft")
    return folder


@pytest.fixture(autouse=True)
def fresh() -> None:
    dispatch.reset()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["generate", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_speculation_and_plain_decoding_write_the_same_text(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("hello", "--model", str(model), "--max-new-tokens", "12", "--dispatch", "eager")
    status, text, _ = run(capsys, *common)
    assert status == 0
    assert len(text) > 1
    assert run(capsys, *common, "--plain") == (0, text, "")
    assert run(capsys, *common, "--gamma", "2") == (0, text, "")
    assert run(capsys, *common, "--min-survival", "0.4") == (0, text, "")


def test_a_file_is_a_prompt_as_bytes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"hello")
    common = ("--model", str(model), "--max-new-tokens", "5", "--dispatch", "eager")
    assert run(capsys, "--file", str(file), *common) == run(capsys, "hello", *common)


def test_statistics(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, said = run(
        capsys, "hello", "--model", str(model), "--max-new-tokens", "6", "--dispatch", "eager", "--stats"
    )
    assert status == 0
    for part in ("tokens per step: ", "(5 tokens in ", "acceptance by position: ", "seconds: ", "accept_commit: eager"):
        assert part in said


def test_figures_of_the_report() -> None:
    stats = WorkerStats()
    stats.count_step([4, 2], [3, 0], [4, 1])
    lines = report(6, stats, 0.5, 2.0)
    assert lines[:3] == [
        "tokens per step: 2.50 (5 tokens in 2 steps)",
        "acceptance by position: 0.50 1.00 1.00",
        "seconds: 0.50 to the first token, 2.00 for 5 more, 2.5 tokens/s",
    ]
    assert "no draft was verified" in report(1, WorkerStats(), 0.5, 0.0)[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hello", "--gamma", "8"], "gamma: got 8, need at most 7"),
        (["hello", "--max-new-tokens", "0"], "max_new_tokens: got 0"),
        (["hello", "--max-new-tokens", "0", "--plain"], "max_new_tokens: got 0"),
        (["hello", "--min-survival", "2"], "min_survival: got 2.0"),
        (["x" * 161], "prompt: got 161 tokens, need 1 to 160"),
        ([""], "prompt: got 0 tokens"),
        (["", "--plain"], "prompt: got 0 tokens"),
        (["--file", "/no/such/file"], "/no/such/file"),
        (["hello", "--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_errors_are_one_line(model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    status, text, error = run(capsys, "--model", str(model), "--dispatch", "eager", *arguments)
    assert (status, text) == (2, "")
    assert error.startswith("dspark: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_character_is_written_when_its_last_byte_has_come() -> None:
    out = io.StringIO()
    seen = []

    def pieces():  # type: ignore[no-untyped-def]
        for piece in (list("aé".encode())[:2], list("é".encode())[1:], [0xFF, 256], list("é".encode())[:1]):
            yield piece
            seen.append(out.getvalue())

    assert generating._write(pieces(), out)[0] == 6
    assert seen == ["a", "aé", "aé\ufffd", "aé\ufffd"]
    assert out.getvalue() == "aé\ufffd\ufffd\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_for_terminals_and_leaves_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        bar = ProgressBar(stream, "prefill")
        for done in (5, 10):
            bar(done, 10)
        shown = stream.getvalue()
        if bar.shown:
            assert "\rprefill [###############...............] 5/10" in shown
            assert shown.endswith("\r")
        else:
            assert shown == ""


def test_a_prefill_that_reports_writes_the_same_text(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "def f(x):\n    return x\n" * 6
    common = (prompt, "--model", str(model), "--max-new-tokens", "6", "--dispatch", "eager")
    text = run(capsys, *common)[1]
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert run(capsys, *common)[1] == text
    assert f"/{len(prompt)}" in terminal.getvalue()


def test_fallbacks_are_said_once_and_only_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fallbacks() == ""
    counted = {
        dispatch.CensusKey("accept", dispatch.Path.EAGER, "no-gpu-no-interpreter"): 3,
        dispatch.CensusKey("attention", dispatch.Path.FUSED, dispatch.ELIGIBLE): 3,
        dispatch.CensusKey("kv_write", dispatch.Path.EAGER, "no-gpu-no-interpreter"): 2,
        dispatch.CensusKey("qk_norm_rope", dispatch.Path.EAGER, dispatch.REQUESTED): 2,
    }
    monkeypatch.setattr(dispatch, "census", lambda: counted)
    assert "no-gpu-no-interpreter (2 operations)" in fallbacks()
    assert "requested" not in fallbacks()
