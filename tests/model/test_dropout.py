"""Dropout: only in training mode, at random, from the outputs of attention and MLP."""

import pytest
import torch

from parbank.errors import ConfigError
from parbank.model import GPT
from parbank.model.gpt import UNKNOWN_ID
from parbank.recipes import get_recipe
from parbank.training.config import TrainConfig
from parbank.training.passes import Passes


def make_model(device: str = "cpu") -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    config = get_recipe("nano").model
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.banks.parameters():
            parameter.normal_(std=0.1)  # outputs start at zero, and zero cannot be dropped
    return model.to(device), torch.randint(config.vocab_size, (4, 33), device=device)


def test_training_drops_and_evaluation_does_not() -> None:
    model, batch = make_model()
    ids, targets = batch[:, :-1], batch[:, 1:]
    plain = model(ids, targets)
    model.dropout = 0.3
    first, second = model(ids, targets), model(ids, targets)
    assert len({plain.item(), first.item(), second.item()}) == 3
    torch.manual_seed(1)
    again = model(ids, targets)
    torch.manual_seed(1)
    assert model(ids, targets) == again, "the generator's state decides, so that a checkpoint can restore it"
    model.eval()
    assert torch.equal(model(ids, targets), plain)


def test_gradients_pass_and_the_mean_output_stays() -> None:
    model, batch = make_model()
    ids = batch[:1, :8]
    plain = model.features(ids)
    model.dropout = 0.1
    mean = torch.stack([model.features(ids).detach() for _ in range(200)]).mean(0)
    assert torch.nn.functional.cosine_similarity(mean.flatten(), plain.flatten(), dim=0) > 0.98
    model(batch[:, :-1], batch[:, 1:]).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_token_dropout_hides_inputs_in_training_and_spares_the_starts_of_documents() -> None:
    model, batch = make_model()
    ids = batch[:, :-1].clamp(min=2)
    ids[:, 0] = model.config.bos_id
    hidden = torch.full_like(ids, UNKNOWN_ID).masked_fill(ids == model.config.bos_id, model.config.bos_id)
    everything_hidden = model.features(hidden)
    model.token_dropout = 0.999999
    torch.testing.assert_close(model.features(ids), everything_hidden)
    model.token_dropout = 0.3
    assert not torch.equal(model.features(ids), model.features(ids))
    model.eval()
    evaluated = model.features(ids)
    model.token_dropout = 0.0
    assert torch.equal(model.features(ids), evaluated)


@pytest.mark.parametrize("name", ["dropout", "token_dropout"])
@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_that_makes_no_sense_is_refused(share: float, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.{name} is a share"):
        TrainConfig(**{name: share})


@pytest.mark.gpu
def test_every_replay_of_a_graph_drops_others() -> None:
    model, batch = make_model("cuda")
    model.dropout = 0.3
    passes = Passes(model, model, batch.device, 1, graph=True, precision="bfloat16")
    losses = []
    for _ in range(6):
        passes.start(1)
        passes.add(batch)
        losses.append(passes.loss.item())
    assert len(set(losses)) == 6
