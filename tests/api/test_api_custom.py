"""A plain module that parbank did not write: trained on banks, scored in bits per byte, packed, and unpacked.

It is a `parbank.model.protocol.LanguageModel`, and parbank reads nothing of it that the protocol does not list."""

import math
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parbank
from parbank.artifact.state_dict import unpack_state_dict
from parbank.data.dataset import Dataset, open_dataset
from parbank.errors import ArtifactError, ConfigError, ParbankError
from parbank.model.protocol import LanguageModel

WIDTH, CONTEXT = 48, 32
TEXT = "def answer(question):\n    return question\n" * 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (part(y).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Plain(nn.Module):
    """A transformer as thousands are written: tied head, learned positions, an integer buffer."""

    places: Tensor

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, WIDTH), nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("places", torch.arange(256))
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(self.places[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


HOME = str(Path(parbank.__file__).parent)
OPTIONAL = {"get_input_embeddings", "get_output_embeddings", "get_classifier"}
"""Named in the docstring of the protocol: read where a model has them."""


class Watched(Plain):
    """Notes every attribute that parbank's own code reads of it."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(HOME) and not name.startswith("__"):
            Watched.read.add(name)
        return super().__getattribute__(name)


class Trained(NamedTuple):
    module: Plain
    data: Dataset
    banks: int
    losses: list[float]


def windows(data: Dataset, generator: torch.Generator, count: int = 16) -> Tensor:
    starts = torch.randint(len(data.train) - CONTEXT, (count,), generator=generator).tolist()
    return torch.stack([torch.from_numpy(data.train.read(s, CONTEXT).astype("int64")) for s in starts])


@pytest.fixture(scope="module")
def trained(text_spec: str) -> Trained:
    """Every line of training is the reader's own; parbank gives the banks and the optimizer."""
    torch.manual_seed(0)
    data = open_dataset(text_spec, vocab_size=320, say=lambda line: None)
    module = Plain(320)
    banks = parbank.bank(module)
    optimizer = parbank.ParallelMuon(parbank.split_parameters(module, lr=0.02, adam_lr=3e-3))
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(60):
        ids = windows(data, generator)
        logits = module(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(module, data, len(banks), losses)


def test_it_is_trained_on_banks(trained: Trained) -> None:
    module: LanguageModel = trained.module  # the protocol, as mypy sees it
    assert isinstance(module, LanguageModel)
    assert trained.banks == 3, "8 squares, 2 up, 2 down: one tensor each"
    squares = [m.weight for layer in trained.module.layers for m in (layer.query, layer.key, layer.value, layer.out)]
    assert len({weight.untyped_storage().data_ptr() for weight in squares}) == 1
    assert trained.losses[-1] < trained.losses[0] - 1.5
    assert "places" in module.state_dict()


def test_it_is_scored_in_bits_per_byte(trained: Trained) -> None:
    tokenizer = trained.data.tokenizer
    model = parbank.Model(trained.module, tokenizer, context=CONTEXT)
    ids = torch.tensor([tokenizer.bos_id, *tokenizer.encode(TEXT).tolist()])
    nats = 0.0
    for start in range(0, len(ids) - 1, CONTEXT):  # by hand: windows side by side
        piece = ids[start : start + CONTEXT + 1]
        with torch.no_grad():
            nats += F.cross_entropy(trained.module(piece[None, :-1])[0], piece[1:], reduction="sum").item()
    score = model.score(TEXT)
    assert score.bpb == pytest.approx(nats / math.log(2) / len(TEXT), rel=1e-5)
    assert score.bpb < 4, "it has learnt something: 8.3 is a uniform guess among 320 tokens"
    assert model.score(TEXT, method="sliding", stride=4).bpb < score.bpb, "more context"
    for method in ("streaming", "ttt"):
        with pytest.raises(
            ConfigError, match=r"reads inside the network, and this network is a Plain; use chunked or sliding"
        ):
            model.score(TEXT, method=method)
    assert model.logits([1, 2, 3]).shape == (3, 320)
    assert len(model.sample("def ", tokens=8, seed=1)) > 0
    with pytest.raises(ConfigError, match="export needs a model that parbank built"):
        model.export("x.safetensors")


class Seeing(nn.Module):
    """Attention over all tokens, or over the earlier ones alone; with dropout, which scoring switches off."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal, self.table, self.drop = causal, nn.Embedding(320, WIDTH), nn.Dropout(0.2)
        self.query, self.key, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 320)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        seen = F.scaled_dot_product_attention(self.query(x), self.key(x), x, is_causal=self.causal)
        return self.head(x + self.drop(seen))


class Peeking(nn.Module):
    """Knows the next token of the text alone: no window without its end would show it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(9.0))

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.weight * F.one_hot(torch.cat([ids[:, 1:], ids[:, :1]], 1), 320)
        return logits.masked_fill(torch.arange(320) == 7, -math.inf)  # a token that is ruled out


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(320, 320)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) + torch.randn(320)


def test_a_module_that_sees_later_tokens_gets_no_score(trained: Trained) -> None:
    def score(module: nn.Module, text: str = TEXT) -> float:
        return parbank.Model(module, trained.data.tokenizer, context=CONTEXT).score(text).bpb

    for module in (Seeing(causal=False), Peeking()):
        with pytest.raises(ConfigError, match=f"{type(module).__name__} sees later tokens: its logits before position"):
            score(module)
        assert module.training, "the mode stays"
    assert score(Seeing(causal=True)) > 5
    assert score(Noisy()) > 5, "noise is no sight"
    assert score(trained.module, "a") > 0, "one token, which nothing follows"


class NextRow(nn.Module):
    """Reads the row below: in overlapping windows of one text it holds the next tokens."""

    def forward(self, ids: Tensor) -> Tensor:
        return 9.0 * F.one_hot(ids.roll(-1, 0), 320)


class RowsAbove(nn.Module):
    """Sums the rows up to its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, 320).float().cumsum(0)


class LengthFirst(nn.Module):
    """PyTorch's own layer at its defaults takes the batch for the length, and needs no mask to see no later token."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(320, WIDTH), nn.Linear(WIDTH, 320)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 1, WIDTH, batch_first=batch_first)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (
            nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.layer.self_attn.batch_first else None
        )
        return self.head(self.layer(self.table(ids), mask))


def test_a_module_that_sees_other_rows_gets_no_score(trained: Trained) -> None:
    def score(module: nn.Module) -> float:
        model = parbank.Model(module, trained.data.tokenizer, context=CONTEXT)
        return model.score(TEXT, method="sliding", stride=1).bpb

    for module in (NextRow(), RowsAbove(), LengthFirst(batch_first=False)):
        with pytest.raises(
            ConfigError, match=f"{type(module).__name__} mixes the rows of a batch: the logits of one text"
        ):
            score(module)
    assert score(LengthFirst(batch_first=True)) > 5


def test_a_module_may_have_no_weights(trained: Trained) -> None:
    class Uniform(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.zeros(*ids.shape, 320)

    model = parbank.Model(Uniform(), trained.data.tokenizer, context=8)
    assert model.score(TEXT).loss == pytest.approx(math.log(320))
    assert model.sample("a", tokens=3) != ""


def test_no_token_is_drawn_from_logits_that_are_no_numbers(trained: Trained) -> None:
    class Broken(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.full((*ids.shape, 320), math.nan)

    with pytest.raises(ParbankError, match="logits that are not numbers"):
        parbank.Model(Broken(), trained.data.tokenizer, context=8).sample("a", tokens=3)


def test_parbank_reads_what_the_protocol_lists_and_no_more(trained: Trained) -> None:
    module = Watched(320)
    parbank.bank(module)
    optimizer = parbank.ParallelMuon(parbank.split_parameters(module, lr=0.02))
    ids = windows(trained.data, torch.Generator().manual_seed(0), 2)
    module(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model = parbank.Model(module, trained.data.tokenizer, context=CONTEXT)
    model.score(TEXT[:80])
    model.score(TEXT[:80], method="sliding", stride=16)
    model.sample("def ", tokens=2)
    model.logits([1, 2, 3])
    parbank.pack(model, max_bytes=60_000, calibration=[ids])
    listed = {name for name in (*vars(LanguageModel), *LanguageModel.__annotations__) if not name.startswith("_")}
    assert Watched.read - OPTIONAL == listed


def test_only_a_module_is_taken(trained: Trained) -> None:
    """Also one with everything that the protocol lists: roles are told by the types of layers."""

    class Alike:
        def __getattr__(self, name: str) -> Any:
            return getattr(trained.module, name)

        def __call__(self, ids: Tensor) -> Tensor:
            return trained.module(ids)

    tokenizer: Any = trained.data.tokenizer
    for door in (
        lambda thing: parbank.Model(thing, tokenizer, context=8),
        lambda thing: parbank.pack(thing, max_bytes=10_000),
        parbank.split_parameters,
    ):
        with pytest.raises(ConfigError, match=r"torch\.nn\.Module.*got a? ?Alike"):
            door(Alike())  # type: ignore[operator]


def test_it_is_packed_and_unpacked(trained: Trained, tmp_path: Path) -> None:
    model = parbank.Model(trained.module, trained.data.tokenizer, context=CONTEXT)
    generator = torch.Generator().manual_seed(1)
    calibration = [windows(trained.data, generator, 32) for _ in range(4)]
    path = tmp_path / "plain.pbk"
    cap = 40_000
    packed = parbank.pack(model, max_bytes=cap, calibration=calibration, out=path)
    assert path.stat().st_size == packed.size <= cap
    assert packed.uncalibrated == ()
    loaded = parbank.load(path, device="cpu")
    assert (loaded.context, loaded.tokenizer.fingerprint) == (CONTEXT, trained.data.tokenizer.fingerprint)
    with pytest.raises(ArtifactError, match="parbank did not build; build it, load state_dict"):
        loaded.score(TEXT)
    again = Plain(320)
    again.load_state_dict(loaded.state_dict())
    assert torch.equal(again.places, trained.module.places)
    assert again.head.weight is again.wte.weight
    before, after = (
        parbank.Model(m, loaded.tokenizer, context=loaded.context).score(TEXT).bpb for m in (trained.module, again)
    )
    assert after == pytest.approx(before, rel=0.02)
    copy = loaded.save(tmp_path / "copy.pbk")
    assert copy.read_bytes() == path.read_bytes()


def test_calibration_spends_the_same_bytes_better(trained: Trained) -> None:
    """At a cap that hurts, the file made with calibration has the lower loss on text it has not seen."""
    generator = torch.Generator().manual_seed(2)
    calibration, unseen = (
        [windows(trained.data, generator, 64) for _ in range(8)],
        windows(trained.data, generator, 256),
    )
    losses = {}
    for name, batches in (("with", calibration), ("without", None)):
        packed = parbank.pack(trained.module, max_bytes=16_000, calibration=batches)
        again = Plain(320)
        again.load_state_dict(unpack_state_dict(packed.artifact))
        with torch.no_grad():
            logits = again(unseen[:, :-1])
        losses[name] = F.cross_entropy(logits.flatten(0, 1), unseen[:, 1:].flatten()).item()
    assert losses["with"] < losses["without"] - 0.05


def test_weights_without_a_measurement_are_named(trained: Trained) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(320, 32)
            self.bare = nn.Parameter(torch.randn(32, 320))

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids) @ self.bare

    batches = [torch.randint(320, (2, 9))]
    with pytest.warns(UserWarning, match="no Hessian for .*: bare"):
        packed = parbank.pack(Product(), max_bytes=20_000, calibration=batches)
    assert packed.uncalibrated == ("bare",)
    silent = parbank.pack(Product(), max_bytes=20_000)
    assert silent.uncalibrated == ("bare", "table.weight"), "nothing was asked for, so nothing is warned of"


def test_what_pack_refuses(trained: Trained) -> None:
    state = trained.module.state_dict()
    for arguments, message in (
        ({"model": state, "max_bytes": 0}, "must be positive"),
        ({"model": state, "max_bytes": "8 apples"}, "'8 apples' is not understood; a size is written as 16MB"),
        ({"model": state, "max_bytes": 10_000, "calibration": []}, "nothing runs it"),
        ({"model": trained.module, "max_bytes": 10_000, "calibration": "stdlib"}, "give a list of batches"),
        ({"model": [1], "max_bytes": 10_000}, "a Model, a torch.nn.Module or a state dict, got a list"),
        ({"model": state, "max_bytes": 10_000, "settings": {"model.layers": 2}}, "model is not a setting"),
    ):
        with pytest.raises(ConfigError, match=message):
            parbank.pack(**arguments)  # type: ignore[arg-type]


def test_a_module_that_is_no_language_model_says_so(trained: Trained) -> None:
    class Pooled(Plain):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).mean(1)

    model = parbank.Model(Pooled(320), trained.data.tokenizer, context=CONTEXT)
    with pytest.raises(ConfigError, match=r"Pooled returned \(2, 320\).*returns logits of shape \(2, \d+, 320\)"):
        model.score("def f")
