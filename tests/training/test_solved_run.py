"""On a trained model: at equal bytes the solver loses less than integers per row."""

from pathlib import Path

import pytest
import torch

from parbank.artifact.calibrate import calibrate
from parbank.artifact.container import decode_artifact
from parbank.artifact.pack import pack_solved, pack_tensors, unpack_tensors
from parbank.config import override
from parbank.data.dataset import open_dataset
from parbank.data.tokenizer import Tokenizer
from parbank.display import Display
from parbank.errors import DataError
from parbank.eval.windows import score_chunked
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.checkpoint import load_checkpoint, save_checkpoint
from parbank.training.load import load_trained
from parbank.training.pack import open_training_tokens, pack_checkpoint
from parbank.training.run import run

CPU = Runtime(device=torch.device("cpu"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text_spec: str) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    config = override(get_recipe("nano"), f"data={text_spec}", "budget.steps=150", "quant.method=rows")
    run(config, CPU, out, display=Display(enabled=False))
    return out


def test_the_solver_loses_less_than_rows_at_equal_bytes(trained: Path, text_spec: str) -> None:
    model, tokenizer, config = load_trained(trained, CPU.device)
    dataset = open_dataset(text_spec, vocab_size=320, say=lambda line: None)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    context = config.batch.sequence_length
    quant = QuantConfig(calibration_tokens=16_384)
    calibration = calibrate(model, dataset.train, quant, context=context, runtime=CPU)

    def loss(weights: dict[str, torch.Tensor]) -> float:
        model.load_state_dict(weights)
        return score_chunked(model, dataset.val, tokenizer, context=context, runtime=CPU).loss

    before = loss(tensors)
    rows = pack_tensors(tensors, QuantConfig(matrix_bits=3, min_matrix_bits=3, embedding_bits=4))
    lost = {"rows": loss(unpack_tensors(rows.artifact)) - before}
    for name, measured in (("solver", calibration), ("weights alone", Calibration())):
        packed = pack_solved(tensors, QuantConfig(), measured, max_bytes=rows.size)
        assert packed.size <= rows.size
        lost[name] = loss(unpack_tensors(decode_artifact(packed.data))) - before
    assert lost["solver"] < 0.5 * lost["rows"], lost
    assert lost["solver"] < lost["weights alone"], lost


def test_packing_without_the_training_text_says_so_and_with_other_text_works(
    trained: Path, text_spec: str, tmp_path: Path
) -> None:
    saved = load_checkpoint(next((trained / "checkpoint").iterdir()))
    saved["config"]["data"] = f"text:{tmp_path / 'gone'}"
    saved["config"]["quant"]["method"] = "solver"
    lost = save_checkpoint(tmp_path / "run" / "checkpoint", saved, keep=1)

    class Lines(Display):
        def __init__(self) -> None:
            super().__init__(enabled=False)
            self.lines: list[str] = []

        def say(self, text: str) -> None:
            self.lines.append(text)

    lines = Lines()
    target, packed = pack_checkpoint(lost, 30_000, tmp_path / "a.pbk", display=lines)
    assert target.stat().st_size == packed.size <= 30_000
    assert any("nothing is calibrated" in line for line in lines.lines)
    _, calibrated = pack_checkpoint(lost, 30_000, tmp_path / "b.pbk", data=text_spec, display=(lines := Lines()))
    assert calibrated.data != packed.data
    assert not any("nothing is calibrated" in line for line in lines.lines)
    rows = Lines()
    pack_checkpoint(lost, 60_000, tmp_path / "r.pbk", settings=("quant.method=rows",), data=text_spec, display=rows)
    assert any("of the training text" in line and "which costs" in line for line in rows.lines)
    with pytest.raises(DataError):
        pack_checkpoint(lost, 30_000, tmp_path / "c.pbk", data=f"text:{tmp_path / 'gone'}")


def test_calibration_needs_training_text_alone(tmp_path: Path) -> None:
    text = "".join(f"Line {i} says that the square of {i} is {i * i}.\n" for i in range(300))
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text("Line 1.")
    spec = f"text:train={tmp_path}/long.txt,val={tmp_path}/short.txt"
    tokenizer = Tokenizer.train([text], vocab_size=300)
    tokens = open_training_tokens(spec, tokenizer, context=64, count=256, say=lambda line: None)
    assert len(tokens) > 64, "validation text is shorter than a window, and is not read"
    with pytest.raises(
        DataError, match=r"short to calibrate on: its training part has \d+ tokens, and a window needs 100001"
    ):
        open_training_tokens(spec, tokenizer, context=100_000, count=256, say=lambda line: None)
