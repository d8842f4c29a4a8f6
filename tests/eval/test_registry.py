"""Methods and adapters by name: settings find their owner or are refused, and a new one is a class and a name."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch

from parbank.config import to_dict
from parbank.data.shards import TokenSet
from parbank.errors import ConfigError
from parbank.eval import methods
from parbank.eval.adaptation import ADAPTERS
from parbank.eval.adaptation.base import AdaptConfig
from parbank.eval.methods import METHODS, make_method
from parbank.eval.methods.chunked import Chunked
from parbank.eval.methods.sliding import Sliding
from parbank.eval.methods.ttt import ScoreFirst
from parbank.eval.result import compare
from parbank.runtime import Runtime
from tests.eval.test_score import make_model

CPU = Runtime(device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("x", {}, "--method must be one of chunked, sliding, streaming, ttt, adaptive, got 'x'"),
        ("chunked", {"stride": 64}, "--stride is not a setting of chunked; that is for sliding and ttt"),
        ("streaming", {"stride": 64}, "--stride is not a setting of streaming; that is for sliding and ttt"),
        (
            "chunked",
            {"segment": 5},
            "--segment is not a setting of chunked; that is for streaming and ttt and adaptive",
        ),
        ("sliding", {"lr": 0.1}, "--lr is not a setting of sliding; that is for ttt and adaptive"),
        ("sliding", {"beams": 4}, "--beams is not a setting of sliding; sliding has: context, graphed, stride"),
        ("ttt", {"stride": 64}, "--stride is not a setting of ttt with streaming scores and the sgd adapter"),
        ("ttt", {"rank": 4}, "--rank is not a setting of ttt with streaming scores and the sgd adapter"),
        ("ttt", {"scores": "chunked"}, "--ttt-scores must be one of streaming, sliding, got 'chunked'"),
        ("ttt", {"adapter": "x"}, "--adapter must be one of sgd, low-rank, got 'x'"),
        ("ttt", {"epochs": "x"}, "epochs must be a whole number, got 'x'"),
        ("streaming", {"segment": 0}, "--segment must be at least 1, got 0"),
        ("ttt", {"segment": 0}, "--segment must be at least 1, got 0"),
        ("chunked", {"context": 0}, "at least 1 token, got 0"),
        ("ttt", {"context": 40_000, "chunk": 40_000}, "windows of 40000 tokens; a model has 32768 positions"),
    ],
)
def test_settings_without_an_owner_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_method(name, **settings)
    assert message in str(caught.value)


def test_settings_find_their_owner() -> None:
    assert make_method("sliding", context=16, stride=None) == Sliding(context=16)
    assert Sliding(context=16).step == 16
    assert Sliding(context=2048).step == 64
    found = make_method("ttt", context=32, graphed=False, scores="sliding", stride=8, adapter="low-rank", rank=3, lr=1)
    assert isinstance(found, ScoreFirst)
    assert found.scores == Sliding(context=32, stride=8, graphed=False)
    assert (found.context, found.graphed) == (32, False)
    assert found.adapt == ADAPTERS["low-rank"](lr=1.0, rank=3)  # type: ignore[call-arg]
    assert found.chunk == 32
    assert isinstance(make_method("ttt"), ScoreFirst)
    with pytest.raises(ConfigError, match="one context: 32 is given for learning and 16"):
        ScoreFirst(context=32, scores=Sliding(context=16))


@pytest.mark.parametrize("config", [*METHODS.values(), *ADAPTERS.values()], ids=lambda config: config.name)
def test_every_setting_is_explained(config: type[Any]) -> None:
    settings = config.settings() if hasattr(config, "settings") else methods.base.setting_docs(config)
    assert all(settings.values()), settings
    assert config.help
    assert config.rounding <= {field.name for field in fields(config)}


def test_what_identifies_a_score_is_what_results_have_always_said() -> None:
    """As they were written before methods had files of their own. Only what becomes of documents was added: older
    results, which lack it, still compare (test_result.py)."""
    about = {
        "chunked": make_method("chunked", context=32),
        "sliding": make_method("sliding", context=32, batch_tokens=7),
        "streaming": make_method("streaming", context=32, segment=7),
        "sgd": make_method("ttt", context=32, segment=7, blocks=(2, 1, 2), micro_tokens=5),
        "low-rank": make_method("ttt", context=32, scores="sliding", adapter="low-rank", freeze=1),
    }
    shared = {"epochs": 3, "sequences": 32, "clip": 1.0, "freeze": 0, "blocks": ()}
    sgd = {"adapter": "sgd", "scores": "streaming", "lr": 0.002, "chunk": 32_768, "momentum": 0.9, "blocks": (1, 2)}
    sgd["documents"] = "in the order of the text"
    low = {"adapter": "low-rank", "scores": "sliding", "lr": 0.001, "chunk": 32, "rank": 8, "freeze": 1}
    low["documents"] = "learnt one by one, each anew"
    assert {name: method.describe() for name, method in about.items()} == {
        "chunked": {"method": "chunked", "context": 32, "stride": None, "adapt": None},
        "sliding": {"method": "sliding", "context": 32, "stride": 32, "adapt": None},
        "streaming": {"method": "streaming", "context": 32, "stride": None, "adapt": None},
        "sgd": {"method": "ttt", "context": 32, "stride": None, "adapt": shared | sgd},
        "low-rank": {"method": "ttt", "context": 32, "stride": 32, "adapt": shared | low},
    }


@dataclass(frozen=True, kw_only=True)
class Doubled(Chunked):
    name = "doubled"
    help = "every token at twice its price"

    times: int = 2
    """How many times the price."""

    def score(self, *args: Any, **settings: Any) -> Any:
        scored = super().score(*args, **settings)
        return type(scored)(scored.tokens, scored.nats * self.times)


@dataclass(frozen=True, kw_only=True)
class Shrink(AdaptConfig):
    name = "shrink"
    help = "every weight a little smaller"

    factor: float = 0.9
    """What weights are multiplied by."""

    def make_adapter(self, model: Any, *args: Any, **settings: Any) -> Any:
        config = self

        class Shrinking:
            def learn(self, tokens: torch.Tensor, progress: float) -> None:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(config.factor)

            def reset(self) -> None: ...

        return Shrinking()


def test_a_new_method_is_a_class_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "doubled", Doubled)
    tokens = TokenSet([np.random.default_rng(0).integers(0, 320, 100).astype(np.uint16)])
    plain, double, triple = (
        make_method(name, context=16, **settings)
        for name, settings in (("chunked", {}), ("doubled", {}), ("doubled", {"times": 3}))
    )
    nats = [method.score(make_model(), tokens, CPU).nats for method in (plain, double, triple)]
    assert np.array_equal(nats[1], 2 * nats[0])
    assert np.array_equal(nats[2], 3 * nats[0])
    assert double.describe()["options"] == {"times": 2}
    results = [{"val_bpb": 1.0, "text_sha256": "a", "bytes": 9, **method.describe()} for method in (double, triple)]
    with pytest.raises(ConfigError, match=r"the options of the method \(times\) is 2 here and 3 in b"):
        compare(results[0], results[1], "b")
    assert compare(results[0], results[0], "a")["difference_bpb"] == 0


def test_a_new_adapter_is_a_class_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "shrink", Shrink)
    tokens = TokenSet([np.random.default_rng(0).integers(0, 320, 100).astype(np.uint16)])
    method = make_method("ttt", context=16, chunk=40, adapter="shrink", factor=0.0)
    nats = method.score(make_model(), tokens, CPU).nats
    np.testing.assert_allclose(nats[40:], np.log(320), rtol=1e-5)
    assert np.abs(nats[:40] - np.log(320)).max() > 0.1
    assert method.describe()["adapt"]["factor"] == 0.0
    assert isinstance(method, ScoreFirst)
    assert to_dict(method.adapt)["factor"] == 0.0
