"""Export and import: the tensors are equal bit for bit, and what does not belong together is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from parbank.artifact.container import read_artifact, write_artifact
from parbank.artifact.contents import read_specs
from parbank.artifact.load import load_artifact
from parbank.artifact.pack import pack_solved, pack_tensors, unpack_tensors
from parbank.artifact.safetensors import export_model, import_model
from parbank.data.tokenizer import Tokenizer
from parbank.errors import ArtifactError, ConfigError
from parbank.model.gpt import MAX_POSITIONS
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.training.load import load_model

DATA = Path(__file__).parent / "data"
FIRST, SECOND = DATA / "v1.pbk", DATA / "v2.pbk"
CPU = torch.device("cpu")


def export(path: Path, out: Path | None, dtype: str) -> tuple[Path, Path, int]:
    """As the command does it."""
    loaded = load_model(path, CPU)
    target = out or loaded.source.with_suffix(".safetensors")
    return target, *export_model(loaded, target, dtype)


def test_a_model_goes_out_and_back_bit_for_bit(tmp_path: Path):
    weights = unpack_tensors(read_artifact(FIRST))
    file, tokenizer, count = export(FIRST, tmp_path / "model.safetensors", "float32")
    exported = load_file(file)
    assert count == len(weights) == len(exported)
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert tokenizer.read_bytes() == read_artifact(FIRST).sections["tokenizer"]
    result = import_model(file, tmp_path / "back.pbk")
    assert (result.count, result.exact) == (count, count)
    assert result.size == (tmp_path / "back.pbk").stat().st_size
    back = read_artifact(tmp_path / "back.pbk")
    found = unpack_tensors(back)
    assert all(found[name].numpy().tobytes() == weights[name].numpy().tobytes() for name in weights)
    assert back.meta == read_artifact(FIRST).meta
    assert load_artifact(tmp_path / "back.pbk", CPU).context == 32
    again = tmp_path / "again.pbk"
    import_model(file, again)
    assert again.read_bytes() == (tmp_path / "back.pbk").read_bytes()


def test_a_solved_model_comes_back_at_its_size(tmp_path: Path):
    """Rotated or not, by the same integers: coarse ones could be taken for either."""
    artifact, tensors = read_artifact(FIRST), unpack_tensors(read_artifact(FIRST))
    extra = {"tokenizer": artifact.sections["tokenizer"]}
    tight = len(pack_tensors(tensors, QuantConfig(), meta=artifact.meta, extra_sections=extra).data) - 7000
    packed = pack_solved(
        tensors, QuantConfig(), Calibration(), max_bytes=tight, meta=artifact.meta, extra_sections=extra
    )
    packed.write(tmp_path / "model.pbk")
    assert any(spec.rotation for spec in read_specs(packed.artifact))
    file, _, count = export(tmp_path / "model.pbk", None, "float32")
    result = import_model(file, tmp_path / "back.pbk")
    assert result.exact == count
    assert result.size <= packed.size + 8


def test_what_an_export_says_about_itself(tmp_path: Path):
    file, tokenizer, _ = export(SECOND, tmp_path / "model.safetensors", "float32")
    with safe_open(file, framework="pt") as opened:
        about = opened.metadata()
    assert json.loads(about["parbank"]) == read_artifact(SECOND).meta
    assert about["tokenizer_sha256"] == Tokenizer.load(tokenizer).fingerprint
    assert about["tokenizer_file"] == "model.model"


def test_rotated_and_corrected_tensors_go_out_multiplied_and_come_back_rounded(tmp_path: Path):
    file, _, count = export(SECOND, tmp_path / "model.safetensors", "float32")
    result = import_model(file, tmp_path / "back.pbk")
    assert result.count - 6 <= result.exact < count  # rotation, groups and rank are not looked for
    found, weights = (unpack_tensors(read_artifact(path)) for path in (tmp_path / "back.pbk", SECOND))
    assert all((found[name] - weights[name]).abs().max() < 0.02 for name in weights)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smaller_types_are_rounded_once(tmp_path: Path, dtype: str):
    file, _, _ = export(FIRST, tmp_path / "model.safetensors", dtype)
    exported, weights = load_file(file), unpack_tensors(read_artifact(FIRST))
    assert all(torch.equal(exported[name], weights[name].to(getattr(torch, dtype))) for name in weights)
    assert import_model(file, tmp_path / "back.pbk").size > 10_000


def test_a_cap_is_kept(tmp_path: Path):
    file, _, _ = export(FIRST, tmp_path / "model.safetensors", "float32")
    size = import_model(file, tmp_path / "whole.pbk").size
    result = import_model(file, tmp_path / "small.pbk", max_bytes=size - 200)
    assert result.size <= size - 200
    with pytest.raises(
        ArtifactError, match=rf"does not fit 1,000 bytes: as it is it takes {size:,}.*row.*`parbank pack`"
    ):
        import_model(file, tmp_path / "no.pbk", max_bytes=1000)
    assert not (tmp_path / "no.pbk").exists()
    coarse = import_model(file, tmp_path / "lzma.pbk", settings=("quant.coder=lzma",))
    assert coarse.size > size


def test_what_does_not_belong_together_is_refused_by_name(tmp_path: Path):
    file, tokenizer, _ = export(FIRST, tmp_path / "model.safetensors", "float32")
    with safe_open(file, framework="pt") as opened:
        about = opened.metadata()
    tensors, out = load_file(file), tmp_path / "no.pbk"

    def refused(match: str, changed: dict | None = None, metadata: dict | None = about, **options) -> None:
        path = tmp_path / "other.safetensors"
        save_file(tensors if changed is None else changed, path, metadata=metadata)
        (tmp_path / "other.model").write_bytes(tokenizer.read_bytes())
        with pytest.raises((ArtifactError, ConfigError), match=match):
            import_model(path, out, **options)
        assert not out.exists()

    refused("no config of a parbank model", metadata={"format": "pt"})
    refused("config of .* cannot be read", metadata=about | {"parbank": "[" * 100_000})
    refused("config of .* cannot be read", metadata=about | {"parbank": "7"})
    refused("does not fit its config", metadata=about | {"parbank": "{}"})
    meta = json.loads(about["parbank"])
    for key, value in (("layers", 3), ("width", 4 * 10**30), ("vocab_size", 300), ("layers", 10**9)):
        broken = json.dumps(meta | {"model": meta["model"] | {key: value}})
        refused("does not fit its config", metadata=about | {"parbank": broken})
    for key, value in (("context", "32"), ("context", MAX_POSITIONS + 1), ("data", 5)):  # no reader would load them
        refused(f"its {key} is", metadata=about | {"parbank": json.dumps(meta | {key: value})})
    refused("skip_gains is absent in the file", {n: t for n, t in tensors.items() if n != "skip_gains"})
    refused("more is .* by its config", tensors | {"more": torch.ones(2)})
    refused("float", tensors | {"skip_gains": torch.ones(1, 16, dtype=torch.int64)})
    refused("not finite", tensors | {"token_embedding.weight": torch.full((288, 16), torch.nan)})
    refused("not the tokenizer", metadata=about | {"tokenizer_sha256": "0" * 64})
    refused("cannot be read.*--tokenizer", tokenizer=tmp_path / "missing.model")
    refused("--max-bytes must be positive", max_bytes=0)
    refused("quant.nonsense", settings=("quant.nonsense=1",))
    for setting in ("method=solver", "method=rows", "rotation=false", "low_rank=4", "pruning=0"):
        refused(f"quant.{setting.split('=')[0]} does not apply .*quant.matrix_bits", settings=(f"quant.{setting}",))
    for content in (b"", b"hello", bytes(64), (2**60).to_bytes(8, "little") + b"{}"):
        (tmp_path / "broken.safetensors").write_bytes(content)
        with pytest.raises(ArtifactError, match=r"broken\.safetensors is not a valid safetensors file"):
            import_model(tmp_path / "broken.safetensors", out)
    with pytest.raises(ArtifactError, match="does not exist"):
        import_model(tmp_path / "missing.safetensors", out)


def test_a_config_can_be_given(tmp_path: Path):
    file, _, _ = export(FIRST, tmp_path / "model.safetensors", "float32")
    save_file(load_file(file), file)
    (tmp_path / "config.json").write_text(json.dumps(read_artifact(FIRST).meta))
    assert import_model(file, tmp_path / "back.pbk", config=tmp_path / "config.json").exact == 30


def test_exports_that_cannot_be_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="float64"):
        export(FIRST, tmp_path / "model.safetensors", "float64")
    with pytest.raises(ConfigError, match=r"\.safetensors"):
        export(FIRST, tmp_path / "model.bin", "float32")
    with pytest.raises(ArtifactError, match="does not exist"):
        export(tmp_path / "missing.pbk", None, "float32")
    artifact = read_artifact(FIRST)
    extra = pack_tensors({"more": torch.ones(20, 20)}, QuantConfig()).artifact.sections  # not what its config makes
    write_artifact(tmp_path / "evil.pbk", artifact.meta, {"tokenizer": artifact.sections["tokenizer"], **extra})
    with pytest.raises(ArtifactError, match=r"evil\.pbk"):
        export(tmp_path / "evil.pbk", None, "float32")
