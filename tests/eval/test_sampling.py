"""Sampling: the same seed the same text, greedy where it should be, and an end where the model ends."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.data.dataset import Dataset, open_dataset
from parbank.data.tokenizer import Tokenizer
from parbank.errors import ConfigError
from parbank.eval.sampling import (
    Drawn,
    check_settings,
    draw_steps,
    draw_tokens,
    find_sight,
    sample_tokens,
    write_text,
)
from parbank.model import GPT
from parbank.model.protocol import PlainModel
from parbank.model.stream import Stream
from parbank.recipes import get_recipe
from tests.eval.test_score import make_model


@pytest.fixture(scope="module")
def tokenizer(text_spec: str) -> Tokenizer:
    dataset: Dataset = open_dataset(text_spec, vocab_size=320, say=lambda line: None)
    return dataset.tokenizer


@pytest.fixture(scope="module")
def model() -> GPT:
    return make_model(seed=5)


def sample(model: torch.nn.Module, tokenizer: Tokenizer, prompt: str, **options: Any) -> list[int]:
    return list(sample_tokens(model, tokenizer, tokenizer.encode(prompt), **options))


def greedy(model: GPT, window: list[int], count: int) -> list[int]:
    written: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            chosen = int(model(torch.tensor([window + written]))[0, -1].argmax())
        if chosen == model.config.bos_id:
            break
        written.append(chosen)
    return written


def test_the_same_seed_writes_the_same_and_another_does_not(model: GPT, tokenizer: Tokenizer) -> None:
    texts = [sample(model, tokenizer, "def ", tokens=30, temperature=1.0, seed=s) for s in (7, 7, 8)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    state = torch.random.get_rng_state()
    list(sample_tokens(model, tokenizer, tokens=3))
    assert torch.equal(torch.random.get_rng_state(), state), "sampling draws from a generator of its own"


def test_zero_temperature_and_one_candidate_are_greedy(model: GPT, tokenizer: Tokenizer) -> None:
    expected = greedy(model, [tokenizer.bos_id, *map(int, tokenizer.encode("class A"))], 20)
    for seed in (0, 1):
        assert sample(model, tokenizer, "class A", tokens=20, temperature=0, seed=seed) == expected
        assert sample(model, tokenizer, "class A", tokens=20, top_k=1, seed=seed) == expected
        assert sample(model, tokenizer, "class A", tokens=20, temperature=1e-320, seed=seed) == expected


@pytest.mark.gpu
@torch.no_grad()
def test_a_gpu_writes_the_same_replayed_as_launched(tokenizer: Tokenizer) -> None:
    model = make_model(seed=5).cuda()
    window = [tokenizer.bos_id, *map(int, tokenizer.encode("class A"))]
    stream, read = Stream(model, 16), 0  # launch by launch
    expected: list[int] = []
    while len(expected) < 40:
        ids = torch.tensor(window + expected, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            chosen = int(stream.read(ids, read, len(ids), last=True)[-1].argmax())
        if chosen == tokenizer.bos_id:
            break
        read = len(ids)
        expected.append(chosen)
    assert len(expected) > 5, "long enough to be replayed"
    assert sample(model, tokenizer, "class A", tokens=40, temperature=0, context=16) == expected


def test_top_k_keeps_the_k_likeliest(model: GPT, tokenizer: Tokenizer) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([[tokenizer.bos_id]]))[0, -1]
    kept = set(logits.topk(3).indices.tolist())
    drawn = [list(sample_tokens(model, tokenizer, tokens=1, temperature=t, top_k=3, seed=s))
             for s in range(40) for t in (5.0, 1e300)]  # fmt: skip
    found = {token for tokens in drawn for token in tokens}
    assert found == kept - {tokenizer.bos_id}
    everything = [list(sample_tokens(model, tokenizer, tokens=1, temperature=1.0, top_k=k)) for k in (0, 320, 10**6)]
    assert everything[0] == everything[1] == everything[2]


def test_top_p_keeps_the_fewest_tokens_with_that_share(model: GPT, tokenizer: Tokenizer) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([[tokenizer.bos_id]]))[0, -1].double()
    chances, order = torch.softmax(logits / 4, 0).sort(descending=True)
    count = int((chances.cumsum(0) < 0.05).sum()) + 1  # the fewest with a share of 0.05 or more
    assert 3 < count < 30
    kept = set(order[:count].tolist())
    seeds = range(20 * count)

    def draw(top_p: float, top_k: int = 0) -> set[int]:
        options = {"tokens": 1, "temperature": 4.0, "top_p": top_p, "top_k": top_k}
        return {token for s in seeds for token in sample_tokens(model, tokenizer, seed=s, **options)}

    assert draw(0.05) == kept - {tokenizer.bos_id}
    assert draw(0.3, top_k=4) == set(order[:2].tolist()) - {tokenizer.bos_id}, "a share of what the k likeliest have"
    assert draw(1e-9) == {int(order[0])}, "the likeliest stays, however small its share"
    whole = [list(sample_tokens(model, tokenizer, tokens=9, seed=4, top_p=p)) for p in (1.0, 1 - 1e-12)]
    assert whole[0] == whole[1]


def test_a_model_of_somebody_else_writes_the_same(model: GPT, tokenizer: Tokenizer) -> None:
    """The forward pass over the window is all that is used of it, and up to a window it sees what a stream sees."""
    plain = PlainModel(model, vocab_size=320, bos_id=tokenizer.bos_id)
    for options in ({"temperature": 0}, {"seed": 3, "top_p": 0.9}):
        own, theirs = (sample(m, tokenizer, "class A", tokens=20, **options) for m in (model, plain))
        assert own == theirs
    short = sample(plain, tokenizer, "class A", tokens=1, temperature=0, context=1)
    assert short == greedy(model, [int(tokenizer.encode("class A")[-1])], 1)


def test_a_text_ends_before_its_stop_string(tokenizer: Tokenizer) -> None:
    text = "one and two, then thr\u00e9\u00e9 and more"
    tokens = tokenizer.encode(text).tolist()
    assert "".join(write_text(tokenizer, (), tokens)) == text
    for stop, kept in [
        (["then"], "one and two, "),
        (["and more", "two"], "one and "),
        (["two, then", "wo"], "one and t"),  # the shorter one is complete first
        (["o"], ""),
        (["\u00e9 and"], "one and two, then thr\u00e9"),
        (["not there"], text),
        (["and more still"], text),  # held back until the end, and then given
        (["more"], text[:-4]),
    ]:
        pieces = list(write_text(tokenizer, (), tokens, stop))
        assert "".join(pieces) == kept, stop
    beyond = iter(tokens)
    assert "".join(write_text(tokenizer, (), beyond, ["and"])) == "one "
    assert len(list(beyond)) > len(tokens) / 2, "what follows a stop string is not computed"


@given(
    st.text(alphabet="ab \u00e9", max_size=30),
    st.lists(st.text(alphabet="ab \u00e9", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_stop_strings_cut_as_a_search_in_the_whole_text_does(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    found = "".join(write_text(tokenizer, (), tokenizer.encode(text).tolist(), stop))
    ends = [(place + len(word), place) for word in stop if (place := text.find(word)) >= 0]
    assert found == text[: min(ends)[1] if ends else len(text)], (
        "the first to be complete, however it is cut into tokens"
    )


def test_pieces_are_whole_characters_and_come_early(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a\u221e b").tolist()
    assert len(tokens) >= 6, "the sign is three tokens of a byte each"
    pieces = list(write_text(tokenizer, (), tokens, ["xyz"]))
    assert "\ufffd" not in "".join(pieces)
    assert pieces[:2] == ["a", "\u221e"]
    cut = "".join(write_text(tokenizer, (), tokens[:2]))
    assert cut == "a\ufffd", "half a character at the very end is shown as such"


def test_writing_stops_where_the_document_ends(model: GPT, tokenizer: Tokenizer) -> None:
    ending = GPT(get_recipe("nano").model)
    ending.load_state_dict(model.state_dict())
    with torch.no_grad():
        ending.token_embedding.weight[tokenizer.bos_id] = 0  # its logit is 0, and some other's is larger
    assert len(list(sample_tokens(ending, tokenizer, tokens=25, temperature=0))) == 25
    # the likeliest first token, made to mean the end
    first = next(sample_tokens(ending, tokenizer, tokens=1, temperature=0))
    with torch.no_grad():
        weight = ending.token_embedding.weight
        weight[tokenizer.bos_id] = 3 * weight[first]
    written = list(sample_tokens(ending, tokenizer, tokens=25, temperature=0))
    assert len(written) < 25
    assert tokenizer.bos_id not in written


def test_nothing_further_back_than_every_layer_s_context_is_seen(model: GPT, tokenizer: Tokenizer) -> None:
    """In each of the 4 layers a token sees 3 more before it; an embedding sees two more by smear and bigram."""
    texts = [head * 9 + "abcdefgh" * 9 for head in ("ijk ", "lmn ")]
    ids = [tokenizer.encode(text) for text in texts]
    same = next(n for n in range(len(ids[0])) if ids[0][-1 - n] != ids[1][-1 - n])
    assert same >= 4 * 3 + 2
    narrow, wide = ([sample(model, tokenizer, t, tokens=5, context=c) for t in texts] for c in (4, 1024))
    assert narrow[0] == narrow[1]
    assert wide[0] != wide[1]


@pytest.mark.parametrize("isolate", [False, True])
def test_a_long_prompt_is_read_as_far_back_as_it_matters(
    tokenizer: Tokenizer, isolate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, context = GPT(replace(get_recipe("nano").model, isolate_documents=isolate)), 8
    model.load_state_dict(make_model(seed=5).state_dict())
    prompt = tokenizer.encode("".join(f"class A{n}: pass\n" for n in range(40)))
    needed = find_sight(model, context)
    assert needed < len(prompt) - 50

    def draw() -> list[Drawn]:
        return list(draw_tokens(model, tokenizer, prompt, tokens=3, context=context, likeliest=tokenizer.vocab_size))

    def differ(one: list[Drawn], other: list[Drawn]) -> float:
        pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x.likeliest, y.likeliest)]
        return max(abs(a.probability / b.probability - 1) for a, b in pairs)

    reads: list[int] = []
    read = Stream.read
    monkeypatch.setattr(
        Stream, "read", lambda self, ids, *where, **k: (reads.append(where[1]), read(self, ids, *where, **k))[1]
    )
    found = draw()
    assert reads == [needed, needed + 1, needed + 2], "and no more"
    monkeypatch.setattr("parbank.eval.sampling.find_sight", lambda model, context: len(prompt) + 1)
    assert differ(draw(), found) < 1e-4
    monkeypatch.setattr("parbank.eval.sampling.find_sight", lambda model, context: needed // 2)
    assert differ(draw(), found) > 1e-3, "less would not do"


def test_a_long_prompt_is_read_in_pieces(model: GPT, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sample(model, tokenizer, "class A:\n" * 9, tokens=5, temperature=0)
    monkeypatch.setattr("parbank.eval.sampling.PREFILL", 5)
    assert sample(model, tokenizer, "class A:\n" * 9, tokens=5, temperature=0) == whole
    prompt = tokenizer.encode("class A:\n" * 9)
    steps = list(draw_steps(model, tokenizer, prompt, tokens=5, temperature=0))
    assert steps.index(next(filter(None, steps))) == (1 + len(prompt) - 1) // 5, "others have their turn in between"
    assert [step.choice.token for step in steps if step is not None] == whole


@given(st.text(max_size=40))
@settings(max_examples=50, deadline=None)
def test_any_prompt_goes_through(model: GPT, tokenizer: Tokenizer, prompt: str) -> None:
    written = sample(model, tokenizer, prompt, tokens=2)
    whole = tokenizer.decode_bytes([*map(int, tokenizer.encode(prompt)), *written])
    assert (prompt.encode() + tokenizer.decode_bytes(written)) == whole
    assert prompt + "".join(write_text(tokenizer, tokenizer.encode(prompt), written)) == prompt + tokenizer.decode(
        written
    )


def test_a_space_after_the_prompt_stays_with_a_tokenizer_that_drops_one_before_documents(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("the cat and the dog and the bird\n" * 50, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(source), model_prefix=str(tmp_path / "foreign"), vocab_size=290, model_type="bpe", byte_fallback=True,
        minloglevel=2, num_threads=1,
    )  # fmt: skip
    foreign = Tokenizer.load(tmp_path / "foreign.model")
    words = foreign.encode("the cat")
    assert len(words) >= 2
    head, tail = foreign.decode(words[:1]), words[1:].tolist()
    assert head + "".join(write_text(foreign, words[:1], tail)) == "the cat"
    assert "".join(write_text(foreign, (), words.tolist())) == "the cat"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "at least 1; got 0"),
        ({"temperature": -0.1}, "0 or more, got -0.1"),
        ({"temperature": math.nan}, "0 or more, got nan"),
        ({"temperature": math.inf}, "0 or more, got inf"),
        ({"top_k": -1}, "0 .keep all. or a positive whole number, got -1"),
        ({"top_p": 0.0}, "above 0 and at most 1 .keep all., got 0.0"),
        ({"top_p": 1.1}, "got 1.1"),
        ({"top_p": math.nan}, "got nan"),
        ({"context": 0}, "a whole number of tokens, at least 1; got 0"),
        ({"seed": 2**70}, "from 0 to"),
        ({"seed": -1}, "from 0 to"),
    ],
)
def test_bad_arguments_are_refused_at_once(model: GPT, tokenizer: Tokenizer, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample_tokens(model, tokenizer, **options)


def test_stop_strings_are_checked() -> None:
    options = {"tokens": 1, "temperature": 1.0, "top_k": 0, "seed": 0}
    with pytest.raises(ConfigError, match="must not be empty"):
        check_settings(stop=["a", ""], **options)
    with pytest.raises(ConfigError, match="come as a list"):
        check_settings(stop="end", **options)


def test_the_model_keeps_its_mode(model: GPT, tokenizer: Tokenizer) -> None:
    model.train()
    next(sample_tokens(model, tokenizer, tokens=2))
    list(sample_tokens(model, tokenizer, tokens=2))
    assert model.training
