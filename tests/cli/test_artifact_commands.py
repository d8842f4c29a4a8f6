"""`parbank pack`, `inspect`, `export` and `import`."""

from pathlib import Path

from tests.cli.calls import Call, next_commands


def test_pack_under_another_cap_and_inspect(call: Call, trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "a folder" / "small.pbk"
    answer = call("pack", trained, "--max-bytes", 45_000, "--out", target)
    assert answer.code == 0
    assert str(target) in answer.out
    assert target.stat().st_size <= 45_000 < (trained / "model.pbk").stat().st_size
    impossible = call("pack", trained, "--max-bytes", 1000, "--out", tmp_path / "no.pbk")
    assert impossible.code == 2
    assert "does not fit" in impossible.err
    assert not (tmp_path / "no.pbk").exists()
    shown = call("inspect", target)
    assert shown.code == 0
    assert f"{target.stat().st_size:,}" in shown.out
    for part in (
        "tokenizer",
        "token_embedding.weight",
        "blocks.3.mlp.down.weight",
        '"layers": 4',
        "embedding",
        "matrix",
    ):
        assert part in shown.out, part
    assert "\x1b" not in shown.out
    for part in ("format  version 2", "coded", "entropy", "total"):
        assert part in shown.out, part
    assert call("inspect", trained).code == 2


def test_export_a_run_and_import_it_again(call: Call, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    answer = call("export", trained, "--out", out)
    assert answer.code == 0
    assert str(out) in answer.out
    assert (tmp_path / "model.model").exists()
    answer = call("import", out, "--out", tmp_path / "back.pbk")
    assert answer.code == 0
    assert f"parbank sample {tmp_path / 'back.pbk'}" in answer.out
    from parbank.artifact.container import read_artifact
    from parbank.artifact.pack import unpack_tensors

    found, weights = (unpack_tensors(read_artifact(p)) for p in (tmp_path / "back.pbk", trained / "model.pbk"))
    assert found.keys() == weights.keys()
    assert all(found[name].equal(weights[name]) for name in weights)
    wrong = call("export", trained, "--format", "gguf")
    assert wrong.code == 2
    assert "there is safetensors" in wrong.err
    (checkpoint,) = sorted((trained / "checkpoint").glob("*.pt"))[-1:]
    assert call("export", checkpoint, "--out", tmp_path / "raw.safetensors", "--dtype", "bfloat16").code == 0


def test_pack_ends_with_a_command_that_scores_the_file(
    call: Call, trained: Path, tmp_path: Path, text_spec: str
) -> None:
    for given in (trained, trained / "checkpoint", next((trained / "checkpoint").glob("*.pt"))):
        answer = call("pack", given, "--max-bytes", "45kB", "--out", tmp_path / "it's small.pbk")
        ((*score,),) = next_commands(answer.out)
        assert score == ["eval", str(tmp_path / "it's small.pbk"), "--data", text_spec]
        assert call(*score, "--device", "cpu").code == 0
    (copy := tmp_path / "alone.pt").write_bytes(given.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "of another program"}')
    answer = call("pack", copy, "--max-bytes", "45kB", "--out", tmp_path / "c.pbk")
    assert next_commands(answer.out) == [["eval", str(tmp_path / "c.pbk"), "--data", "text:val=PATH"]]
    answer = call("pack", copy, "--max-bytes", "45kB", "--out", tmp_path / "b.pbk", "--data", text_spec)
    assert next_commands(answer.out) == [["eval", str(tmp_path / "b.pbk"), "--data", text_spec]]
