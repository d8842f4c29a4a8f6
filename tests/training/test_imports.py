"""What a run does not import: PyTorch's compiler takes seconds, and a run that compiles nothing has no use for it. What
`eval` does not import: the optimizer."""

import subprocess
import sys
from pathlib import Path


def test_neither_a_run_imports_the_compiler_nor_a_score_the_optimizer(text_spec: str, tmp_path: Path) -> None:
    code = (
        "import sys; from parbank.cli.main import app\n"
        "import parbank.cli.scoring, parbank.eval.aside, parbank.eval.breakdown, parbank.eval.methods, parbank.training.load\n"
        "early = [name for name in sys.modules if name.startswith('parbank.optim')]\n"
        f"app(['train', '--recipe', 'nano', '--steps', '2', '--data', {text_spec!r}, '--out', {str(tmp_path / 'run')!r}, "
        "'--device', 'cpu', '--set', 'train.loggers=[\"jsonl\"]'], standalone_mode=False)\n"
        "print('imported:', *early, *[name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "imported:"
