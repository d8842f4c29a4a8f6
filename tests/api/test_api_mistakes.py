"""Arguments of a wrong kind end in a sentence, in the words of Python, and destroy nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import parbank
from parbank.api.words import translate
from parbank.errors import ArtifactError, ConfigError


@pytest.fixture(scope="module")
def model(first: parbank.Run, home: Path) -> parbank.Model:
    return parbank.load(home / first.folder, device="cpu")


def make_module() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))


IDS = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))


def test_pack_replaces_no_file_that_is_no_artifact(tmp_path: Path) -> None:
    notes, target = tmp_path / "notes.txt", tmp_path / "module.pbk"
    notes.write_text("my notes", encoding="utf-8")
    for wrong, message in (
        (notes, "exists and is no artifact"),
        (tmp_path, f"is a folder; name a file in it, such as {target.parent}"),
    ):
        with pytest.raises(ArtifactError, match=message):
            parbank.pack(make_module(), max_bytes=10_000, out=wrong, calibration=(_fail for _ in range(1)))  # type: ignore[arg-type]
    assert notes.read_text(encoding="utf-8") == "my notes"
    for _ in range(2):  # an artifact may be replaced
        parbank.pack(make_module(), max_bytes=10_000, out=target)


def _fail() -> None:
    raise AssertionError("refused before any work")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_bytes": float("nan")}, "a number of bytes such as 8_000_000, or '8MB'; got nan"),
        ({"max_bytes": float("inf")}, "a number of bytes such as 8_000_000, or '8MB'; got inf"),
        ({"max_bytes": None}, "or '8MB'; got None"),
        ({"max_bytes": True}, "or '8MB'; got True"),
        ({"max_bytes": "8 megs"}, "'8 megs' is not understood; a size is written as 16MB"),
        ({"max_bytes": 10_000, "loss": 3}, "loss is a function of the output and the batch, got 3"),
        (
            {"max_bytes": 10_000, "calibration": [IDS], "loss": lambda out, batch: out},
            r"one number as a tensor, got shape \(2, 6, 20\)",
        ),
        ({"max_bytes": 10_000, "calibration": [IDS], "loss": lambda out, batch: 1.0}, "as a tensor, got float"),
        (
            {"max_bytes": 10_000, "calibration": [IDS], "loss": lambda out, batch: out.detach().sum()},
            "compute the loss without no_grad and detach",
        ),
        ({"max_bytes": 10_000, "loss": lambda out, batch: out.sum()}, "give some by calibration, or leave loss out"),
        ({"max_bytes": 10_000, "out": 3}, "a path is a string or a Path, got 3"),
        ({"max_bytes": 10_000, "calibration": IDS}, r"a list of batches, got one tensor; give \[batch\]"),
        (
            {"max_bytes": 10_000, "calibration": [IDS[0]]},
            r"token ids \(B, T\); got a tensor of shape \(6,\): give ids\[None\]",
        ),
        ({"max_bytes": 10_000, "calibration": 3}, "a list of batches, got a int"),
        ({"max_bytes": 10_000, "settings": {"quant.coder": "huffman"}}, "quant.coder must be one of"),
    ],
)
def test_what_pack_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parbank.pack(make_module(), **arguments)


def test_a_loss_may_be_one_number_of_any_shape() -> None:
    """Modules that gather losses of several devices give one number as a row."""
    found = parbank.pack(make_module(), max_bytes=10_000, calibration=[IDS], loss=lambda out, batch: out.mean()[None])
    assert found.size <= 10_000


def test_a_cap_may_be_any_kind_of_number() -> None:
    assert parbank.pack(make_module(), max_bytes=1e4).size <= 10_000  # type: ignore[arg-type]
    assert parbank.pack(make_module(), max_bytes=np.int64(10_000)).size <= 10_000  # type: ignore[arg-type]
    assert parbank.pack(make_module(), max_bytes="10kB").size <= 10_000


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({3: torch.ones(2)}, "names in a state dict are strings, got 3"),
        ({"w": torch.ones(4, 4, device="meta")}, "w is on the device meta, which holds no values"),
        ({"w": torch.eye(4).to_sparse()}, r"w is sparse; pack tensor\.to_dense\(\)"),
        ({"w": torch.ones(4, 4).to(torch.float8_e4m3fn)}, r"w is of torch\.float8_e4m3fn; convert it"),
    ],
)
def test_tensors_that_no_file_can_give_back(state: dict[Any, Tensor], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parbank.pack(state, max_bytes=10_000)


@pytest.mark.parametrize("text", [3, ["a"], 1.5])
def test_score_takes_text_alone(model: parbank.Model, text: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"score takes a text, bytes, a Path or a data spec, got a {type(text).__name__}"
    ):
        model.score(text)


def test_a_mistyped_path_is_noticed(model: parbank.Model) -> None:
    with pytest.warns(UserWarning, match=r"scoring the 7 characters 'bok\.txt' themselves"):
        assert model.score("bok.txt").bytes == 7


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.5, 2], "token ids are whole numbers, got float64"),
        (torch.tensor([1.0]), "token ids are whole numbers, got float32"),
        ([True], "token ids are whole numbers, got bool"),
        ([[1, 2], [3]], r"\(T,\) or \(B, T\) with rows of one length"),
        ([], r"with at least one token; got \(0,\)"),
        ([[[1]]], r"with at least one token; got \(1, 1, 1\)"),
        ("text", "makes ids of it"),
        (3, "logits takes token ids"),
    ],
)
def test_logits_take_ids_alone(model: parbank.Model, ids: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model.logits(ids)


def test_logits_take_ids_of_any_form(model: parbank.Model) -> None:
    expected = model.logits([1, 2, 3])
    forms: tuple[Any, ...] = (iter([1, 2, 3]), (1, 2, 3), np.array([1, 2, 3], np.uint16), torch.tensor([1, 2, 3]))
    for ids in forms:
        assert torch.equal(model.logits(ids), expected)


def test_logits_are_those_of_eval_mode_and_the_mode_stays(model: parbank.Model) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.drop = nn.Embedding(320, 320), nn.Dropout(0.5)

        def forward(self, ids: Tensor) -> Tensor:
            return self.drop(self.table(ids))

    module = Noisy()
    noisy = parbank.Model(module, model.tokenizer, context=8)
    assert torch.equal(noisy.logits([1, 2, 3]), module.table.weight[1:4])
    assert module.training


def test_a_prompt_is_a_string(model: parbank.Model) -> None:
    with pytest.raises(ConfigError, match="the prompt is a string, got a int"):
        model.sample(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": "a"}, "a whole number, at least 1; got 'a'"),
        ({"tokens": 1.5}, "a whole number, at least 1; got 1.5"),
        ({"temperature": "x"}, "a finite number, 0 or more, got 'x'"),
        ({"top_k": 1.5}, "a positive whole number, got 1.5"),
        ({"top_p": "x"}, "at most 1 .keep all., got 'x'"),
        ({"stop": [3]}, r"a list of strings, got \[3\]"),
        ({"stop": None}, "a list of strings, got None"),
        ({"seed": "a"}, "a seed is a whole number from 0 to [0-9]+, got 'a'"),
        ({"context": "x"}, "a whole number of tokens, at least 1; got 'x'"),
    ],
)
def test_settings_of_a_sample_have_their_types(model: parbank.Model, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model.sample("a", **settings)


def test_a_method_is_named_by_a_string(model: parbank.Model) -> None:
    with pytest.raises(ConfigError, match=r"method= must be one of chunked, .*, got 3"):
        model.score("a", method=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 3, b"runs", ["runs"]])
def test_a_path_is_a_string_or_a_path(model: parbank.Model, path: Any) -> None:
    for door in (
        parbank.load,
        model.save,
        model.export,
        parbank.Run.open,
        lambda out: parbank.train(recipe="nano", out=[out]),
    ):
        with pytest.raises(ConfigError, match="a path is a string or a Path, got"):
            door(path)


def test_a_path_may_begin_with_the_home_folder(
    model: parbank.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model.save("~/copy.pbk") == tmp_path / "copy.pbk"
    assert model.export("~/copy.safetensors") == tmp_path / "copy.safetensors"
    assert parbank.load("~/copy.pbk").source == tmp_path / "copy.pbk"
    with pytest.raises(ConfigError, match="zero byte"):
        model.save("a\0b")


def test_the_parts_take_what_they_work_on() -> None:
    with pytest.raises(ConfigError, match=r"bank takes the model, a torch.nn.Module, got a list"):
        parbank.bank([nn.Parameter(torch.ones(2, 2))])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"got a Sequential; split_parameters\(model\) makes the groups"):
        parbank.ParallelMuon(make_module())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"takes a tensor of matrices .*, got a ndarray"):
        parbank.orthogonalize(np.eye(3))  # type: ignore[arg-type]
    banks = parbank.bank(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert repr(banks) == "[Bank(names=('0.weight', '1.weight'))]", "not thousands of numbers"


@pytest.mark.parametrize(
    ("tokenizer", "context", "message"),
    [
        ("gpt2", 8, r"takes a parbank\.data\.tokenizer\.Tokenizer, got a str; Tokenizer\.load\(PATH\) reads"),
        (None, "8", "a whole number of tokens, at least 1; got '8'"),
        (None, 0, "at least 1; got 0"),
    ],
)
def test_what_a_model_is_made_of(tokenizer: Any, context: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parbank.Model(make_module(), tokenizer, context=context)


def test_a_model_without_a_tokenizer_is_packed_and_packed_again(tmp_path: Path) -> None:
    module, path = make_module(), tmp_path / "module.pbk"
    model = parbank.Model(module, None, context=8)
    parbank.pack(model, max_bytes=10_000, calibration=[IDS], out=path)
    loaded = parbank.load(path, device="cpu")
    assert loaded.context == 8
    again = parbank.pack(loaded, max_bytes=9_000)
    assert again.size <= 9_000
    for own, message in (
        (model, "this Model was made without a tokenizer"),
        (loaded, "module.pbk holds no tokenizer: it was packed from a module alone"),
    ):
        with pytest.raises(ArtifactError, match=message):
            own.tokenizer  # noqa: B018 (it raises)
    with pytest.raises(ArtifactError, match="this Model holds the weights of a module that parbank did not build"):
        parbank.Model(module.state_dict(), None, context=8).score("text")
    assert parbank.Model(nn.Identity(), None, context=8).device == torch.device("cpu")


def test_errors_of_the_doors_name_keywords(model: parbank.Model, tmp_path: Path) -> None:
    for call, message in (
        (lambda: model.score("text", method="slidng"), "method= must be one of"),
        (lambda: model.score("text", method="sliding", context=4, stride=9), "lower stride=, or raise context="),
        (
            lambda: model.export(tmp_path / "x.safetensors", dtype="torch.bfloat16"),
            "dtype='torch.bfloat16' is not known",
        ),
        (lambda: parbank.load(tmp_path, device="cuda:99"), "device='cpu' runs here"),
        (lambda: parbank.pack(make_module(), max_bytes=100), "raise max_bytes="),
        (lambda: parbank.train(recipe="nano", steps=1, minutes=1), "give one of minutes=, steps= and tokens="),
    ):
        with pytest.raises((ConfigError, ArtifactError, parbank.errors.DeviceError), match=message):  # type: ignore[attr-defined]
            call()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("choose another --out", "choose another out="),
        ("add --set model.vocab_size=512, or less", 'add settings=["model.vocab_size=512"], or less'),
        ("fix fewer settings by --set", "fix fewer settings by settings="),
        ("continue it by --resume", "continue it by resume=True"),
        ("skip it by --skip-bad", "skip it by skip_bad=True"),
        ("--out /tmp/x should end so", "out='/tmp/x' should end so"),
        ("(--data text:val=PATH), or", "(data='text:val=PATH'), or"),
        ("--data SPEC names other text", "data=SPEC names other text"),
        ("choose others by --ttt-scores", "choose others by scores="),
        ("`parbank train --resume` or --resume", "`parbank train --resume` or resume=True"),
        ("a text with -- dashes", "a text with -- dashes"),
    ],
)
def test_options_become_keywords(message: str, expected: str) -> None:
    assert translate(message) == expected
    assert translate(expected) == expected, "twice changes nothing"
