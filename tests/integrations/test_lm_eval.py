"""parbank's models under the real lm-evaluation-harness, on three small tasks made on the spot."""

import json
import logging
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import parbank
from parbank.data.dataset import open_dataset
from parbank.data.tokenizer import Tokenizer, TokenizerConfig
from parbank.errors import ConfigError, DataError, ParbankError
from tests.data.attacks import letters_to_a

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the packages that the harness imports
    import lm_eval
    from lm_eval.tasks import TaskManager

    from parbank.adapters.lm_eval import ParbankLM, cut_windows, read_generation

pytestmark = pytest.mark.filterwarnings("default")

DOCUMENTS = [
    {"text": "import os\nimport sys\n\n\ndef main():\n    return os.path.join(sys.argv[0])\n", "prompt": "import ", "answer": "os"},
    {"text": "class A:\n    pass\n", "prompt": "class A", "answer": ":"},
    {"text": "naïve = '∞ and on'\n" * 9, "prompt": "def f(", "answer": "self"},
]  # fmt: skip
CHOICES = ["os", "sys", "zzz zzz"]
TASKS = {
    "parbank_choice": """
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: ["os", "sys", "zzz zzz"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "parbank_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "parbank_write": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def model(text_spec: str, tmp_path_factory: pytest.TempPathFactory) -> parbank.Model:
    out = tmp_path_factory.mktemp("runs") / "nano"
    return parbank.train(recipe="nano", data=text_spec, steps=60, out=out, device="cpu", quiet=True).model


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS), encoding="utf-8")
    for name, body in TASKS.items():
        head = (
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{data}'}}}}\ntest_split: test\n"
        )
        (folder / f"{name}.yaml").write_text(head + body, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched, and nothing is written to a user's cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def evaluate(lm: Any, tasks: Path, name: str, **options: Any) -> Any:
    found = lm_eval.simple_evaluate(
        model=lm, tasks=[name], task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0, **options,
    )  # fmt: skip
    return found


def by_hand(model: parbank.Model, prompt: str, continuation: str) -> float:
    """log p(continuation | prompt), one token after another."""
    ids = [model.tokenizer.bos_id, *model.tokenizer.encode(prompt).tolist()]
    total = 0.0
    for token in model.tokenizer.encode(continuation).tolist():
        total += torch.log_softmax(model.logits(ids)[-1].double(), -1)[token].item()
        ids.append(token)
    return total


def test_multiple_choice(model: parbank.Model, tasks: Path) -> None:
    found = evaluate(ParbankLM(model), tasks, "parbank_choice")
    right = 0
    for sample in found["samples"]["parbank_choice"]:
        scores = [float(answer[0]) for answer in (r[0] for r in sample["resps"])]
        prompt = sample["doc"]["prompt"]
        kept = prompt.rstrip()
        expected = [by_hand(model, kept, prompt[len(kept) :] + choice) for choice in CHOICES]
        assert scores == pytest.approx(expected, rel=1e-4), prompt
        right += max(range(3), key=expected.__getitem__) == 0
    assert found["results"]["parbank_choice"]["acc,none"] == pytest.approx(right / len(DOCUMENTS))


def test_bits_per_byte_are_those_of_parbank(model: parbank.Model, tasks: Path) -> None:
    found = evaluate(ParbankLM(model), tasks, "parbank_rolling")
    scores = [model.score(document["text"].encode()) for document in DOCUMENTS[:2]]
    whole = sum(s.bits for s in scores), sum(s.bytes for s in scores)
    long = DOCUMENTS[2]["text"]
    assert len(model.tokenizer.encode(long)) > model.context, "more than a window"
    ids = torch.tensor([model.tokenizer.bos_id, *model.tokenizer.encode(long).tolist()])
    nats, last = 0.0, len(ids) - 1
    for begin in range(0, last, model.context):
        end = min(begin + model.context, last)
        inputs = ids[max(0, end - model.context) : end]  # the last window looks further back
        chances = torch.log_softmax(model.logits(inputs).double(), -1)[begin - end :]
        nats -= chances.gather(-1, ids[begin + 1 : end + 1, None]).sum().item()
    bits, size = whole[0] + nats / math.log(2), whole[1] + len(long.encode())
    assert found["results"]["parbank_rolling"]["bits_per_byte,none"] == pytest.approx(bits / size, rel=1e-5)


def test_generation_is_greedy_and_stops(model: parbank.Model, tasks: Path) -> None:
    found = evaluate(ParbankLM(model), tasks, "parbank_write")
    for sample in found["samples"]["parbank_write"]:
        expected = model.sample(sample["doc"]["prompt"], tokens=12, temperature=0, stop=["\n\n"])
        assert sample["resps"][0][0] == expected


def test_by_name_as_the_harness_s_command_does(model: parbank.Model, tasks: Path) -> None:
    found = evaluate("parbank", tasks, "parbank_choice", model_args=f"model={model.source}", batch_size=1, device="cpu")
    same = evaluate(ParbankLM(model), tasks, "parbank_choice")
    for ours, theirs in zip(found["samples"]["parbank_choice"], same["samples"]["parbank_choice"], strict=True):
        one, other = ([float(r[0][0]) for r in s["resps"]] for s in (ours, theirs))
        assert one == pytest.approx(other, rel=1e-4), "how many windows go together changes rounding only"


def ask(lm: ParbankLM, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    return lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])


def test_any_context_and_any_continuation(model: parbank.Model) -> None:
    lm = ParbankLM(model)
    long = "x = [1, 2, 3]\n" * 40
    pairs = [("", "import os"), ("   ", "a"), (long, "y"), ("def f(", long)]
    found = ask(lm, *pairs)
    assert all(math.isfinite(nats) and nats < 0 for nats, _ in found)
    assert found[0][0] == pytest.approx(-model.score(b"import os").bits * math.log(2), rel=1e-5)
    best = model.sample("class A", tokens=4, temperature=0)
    greedy, other = ask(lm, ("class A", best), ("class A", "zzz"))
    assert (greedy[1], other[1]) == (True, False)
    with pytest.raises(ConfigError, match="empty continuation"):
        ask(lm, ("a", ""))


def test_a_token_across_the_border_does_not_lend_its_characters(model: parbank.Model) -> None:
    """Where a token would span context and continuation, both are encoded apart: the sum is of the continuation alone."""
    lm, tokenizer = ParbankLM(model), model.tokenizer
    word = next(w for w in ("return", "import", "self", "def") if len(tokenizer.encode(w)) == 1)
    (found,) = ask(lm, (word[:2], word[2:]))
    assert found[0] == pytest.approx(by_hand(model, word[:2], word[2:]), rel=1e-4)


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("HTT", "ps"), ("at NASA", " is"), ("the ", "Sea"), ("A", "B"), ("ABC", "D e"), ("ab", "cD"), ("It is", " PARIS")],
)
def test_with_case_operators_both_texts_stay_what_they_are(
    model: parbank.Model, text_spec: str, context: str, continuation: str
) -> None:
    tokenizer = open_dataset(
        text_spec, vocab_size=320, tokenizer=TokenizerConfig(case_operators=True), say=lambda line: None
    ).tokenizer
    ids, first = ParbankLM(parbank.Model(model.module, tokenizer, context=64))._encode_pair(context, continuation)
    assert tokenizer.decode(ids) == context + continuation
    assert tokenizer.decode(ids[:first]) == context.rstrip()


def test_windows_score_each_target_once() -> None:
    for length in range(2, 30):
        for first in (1, length // 2 or 1, length - 1):
            for context, stride in ((4, 4), (8, 4), (5, 2), (1, 1), (100, 50)):
                ids = list(range(length))
                windows = list(cut_windows(0, ids, first, context, stride=stride))
                assert [t for w in windows for t in w.ids[-w.scored :]] == ids[first:]
                for window in windows:
                    assert len(window.ids) - 1 <= context
                    assert window.scored < len(window.ids), "every target has a token before it"


def test_generation_settings() -> None:
    assert read_generation({}) == {"tokens": 256, "temperature": 0.0, "stop": [], "seed": 0}
    found = read_generation({"until": "\n", "temperature": 0.7, "seed": 3})
    assert found == {"tokens": 256, "temperature": 0.7, "stop": ["\n"], "seed": 3}
    assert read_generation({"do_sample": False, "temperature": 0.7})["temperature"] == 0
    assert read_generation({"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_gen_toks": 5}) == {
        "tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": [], "seed": 0,
    }  # fmt: skip
    for cold in ({}, {"temperature": 0.0}):
        with pytest.raises(ConfigError, match="do_sample is true, and the temperature is 0 or not given"):
            read_generation({"do_sample": True, **cold})
    with pytest.raises(ConfigError, match="'num_beams' is not supported; there are until"):
        read_generation({"num_beams": 4})


def test_repeated_requests_give_different_samples(model: parbank.Model) -> None:
    """As of a task that votes over several samples: with one seed, all would be equal."""
    sampled = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12, "seed": 4}
    arguments = [("The sea", sampled)] * 3 + [("A hill", sampled), ("The sea", {"max_gen_toks": 12})]
    texts = ParbankLM(model).generate_until([SimpleNamespace(args=each) for each in arguments])
    alone = [("The sea", 4), ("The sea", 5), ("The sea", 6), ("A hill", 4)]
    assert texts[:4] == [model.sample(text, tokens=12, temperature=1.0, seed=seed) for text, seed in alone]
    assert len(set(texts[:3])) == 3
    assert texts[4] == model.sample("The sea", tokens=12, temperature=0.0)


def test_arguments(model: parbank.Model) -> None:
    assert ParbankLM(model, context="16", batch_size="auto", max_batch_size=None).context == 16
    assert ParbankLM(model).tokenizer_name.startswith("parbank-")
    with pytest.raises(ConfigError, match="no argument 'pretrained'; it takes model, device"):
        ParbankLM(model, pretrained="x")
    for wrong in ("x", "0", -1, 1.5):
        for name in ("context", "batch_size"):
            with pytest.raises(ConfigError, match=f"{name} must be a whole number, at least 1; got {wrong!r}"):
                ParbankLM(model, **{name: wrong})
        with pytest.raises(ConfigError, match="max_gen_toks must be a whole number"):
            read_generation({"max_gen_toks": wrong})


def test_batches_keep_answers_with_their_requests(model: parbank.Model) -> None:
    """Windows are sorted by length and padded: each answer is that of its request alone."""
    pairs = [("import", " os"), ("def f(a, b, c):\n    return", " a"), ("x", " = 1\n"), ("class A", ":\n    pass\n")]
    alone = [ask(ParbankLM(model), pair)[0] for pair in pairs]
    for rows in (1, 3, 4):
        together = ask(ParbankLM(model, batch_size=rows), *pairs)
        assert [nats for nats, _ in together] == pytest.approx([nats for nats, _ in alone], rel=1e-4)


def test_a_module_that_sees_later_tokens_or_gives_no_numbers_is_refused(model: parbank.Model) -> None:
    class Peeking(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 9.0 * torch.nn.functional.one_hot(ids.roll(-1, 1), model.tokenizer.vocab_size)

    class Broken(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.full((*ids.shape, model.tokenizer.vocab_size), math.nan)

    with pytest.raises(ConfigError, match="Peeking sees later tokens"):
        ParbankLM(parbank.Model(Peeking(), model.tokenizer, context=64))
    with pytest.raises(ParbankError, match="logits that are not numbers"):
        ask(ParbankLM(parbank.Model(Broken(), model.tokenizer, context=64)), ("a", "b"))


def test_a_tokenizer_that_rewrites_the_text_gets_no_score(model: parbank.Model) -> None:
    lines = Path(json.__file__).read_text(encoding="utf-8").splitlines()
    hostile = parbank.Model(model.module, Tokenizer.from_bytes(letters_to_a(lines)), context=64)
    with pytest.raises(DataError, match="its tokens are not its text"):
        ParbankLM(hostile).loglikelihood_rolling([SimpleNamespace(args=("some words",))])
