"""A model in steps: the same text as `sample`, the same bits as `score`."""

from pathlib import Path

import numpy as np
import pytest

from parbank.api.model import Model
from parbank.data.tokenizer import Tokenizer, TokenizerConfig
from parbank.errors import ArtifactError, ConfigError, DataError
from parbank.eval.sampling import draw_tokens, sample_tokens
from parbank.eval.surprise import score_pieces
from parbank.model import GPT
from parbank.serve.player import Pieces, Player, load_players, name_models, show_token
from tests.data.attacks import letters_to_a

TEXT = "The sea was calm, — café, naïve, ☃.\n" * 3


def test_drawn_tokens_are_those_of_sampling(player: Player) -> None:
    model, tokenizer = player.model.module, player.model.tokenizer
    assert isinstance(model, GPT)
    prompt = tokenizer.encode("The sea")
    for settings in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.5, "top_k": 20}):
        drawn = list(draw_tokens(model, tokenizer, prompt, tokens=8, seed=3, likeliest=5, **settings))
        assert [found.choice.token for found in drawn] == list(
            sample_tokens(model, tokenizer, prompt, tokens=8, seed=3, **settings)
        )
        for found in drawn:
            falling = [choice.probability for choice in found.likeliest]
            assert falling == sorted(falling, reverse=True)
            assert found.choice.chance > 0


def test_probabilities_are_the_models_and_chances_those_of_the_draw(player: Player) -> None:
    model, tokenizer = player.model.module, player.model.tokenizer
    prompt = tokenizer.encode("The sea")
    (found,) = draw_tokens(model, tokenizer, prompt, tokens=1, temperature=0.0, likeliest=tokenizer.vocab_size)
    logits = player.model.logits(np.concatenate([[tokenizer.bos_id], prompt]))[-1].double()
    own = logits.softmax(-1)
    for choice in found.likeliest:
        assert choice.probability == pytest.approx(float(own[choice.token]), rel=1e-3)
    assert found.choice == found.likeliest[0]
    assert found.choice.chance == 1.0
    assert sum(choice.chance for choice in found.likeliest) == 1.0


def test_top_p_draws_from_the_fewest_that_reach_it(player: Player) -> None:
    model, tokenizer = player.model.module, player.model.tokenizer
    (found,) = draw_tokens(model, tokenizer, tokens=1, temperature=1.0, top_p=0.3, likeliest=tokenizer.vocab_size)
    kept = [choice for choice in found.likeliest if choice.chance > 0]
    assert sum(choice.chance for choice in kept) == pytest.approx(1)
    assert sum(choice.probability for choice in kept) >= 0.3
    assert sum(choice.probability for choice in kept[:-1]) < 0.3


def test_a_tokenizer_that_changes_the_text_gives_no_score(player: Player) -> None:
    """Its letters are all `a`, which any model knows better than the text."""
    lines = [TEXT] * 40
    hostile = Tokenizer.from_bytes(letters_to_a(lines, player.model.tokenizer.vocab_size))
    model = Model(player.model.module, hostile, context=player.model.context)
    with pytest.raises(DataError, match="from byte 0 on the text has"):
        list(Player("hostile", model).measure(TEXT))


@pytest.mark.parametrize("piece", [3, 16, 4096])
def test_pieces_score_as_streaming_does(player: Player, piece: int) -> None:
    tokenizer = player.model.tokenizer
    ids = np.concatenate([[tokenizer.bos_id], tokenizer.encode(TEXT)]).astype(np.uint16)
    assert isinstance(player.model.module, GPT)
    bits = np.concatenate(list(score_pieces(player.model.module, ids, context=player.model.context, piece=piece)))
    assert len(bits) == len(ids) - 1
    assert bits.sum() == pytest.approx(player.model.score(TEXT.encode(), method="streaming").bits, rel=1e-5)


def test_measured_pieces_are_the_text_and_its_bits(player: Player) -> None:
    lines = list(player.measure(TEXT))
    pieces = [piece for line in lines for piece in line.get("pieces", ())]
    score = lines[-1]["score"]
    assert "".join(text for text, _, _ in pieces) == TEXT
    assert sum(tokens for _, _, tokens in pieces) == score["tokens"] == lines[0]["tokens"]
    assert sum(bits for _, bits, _ in pieces) == pytest.approx(score["bits"], abs=0.001 * len(pieces))
    assert score["bytes"] == len(TEXT.encode())
    assert score["bpb"] == pytest.approx(player.model.score(TEXT.encode(), method="streaming").bpb, rel=1e-5)
    snowman = [tokens for text, _, tokens in pieces if text == "☃"]
    assert snowman == [3] * 3, "three bytes, three tokens, one piece"


def test_what_cannot_be_done_is_refused(player: Player, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text"):
        next(player.measure(""))
    with pytest.raises(ConfigError, match="temperature"):
        player.write("a", tokens=5, temperature=-1, top_p=1, seed=0)
    (tmp_path / "text.pbk").write_text("not a model")
    with pytest.raises(ArtifactError, match=r"text\.pbk"):
        load_players([tmp_path / "text.pbk"], "cpu")


def test_a_part_of_a_character_is_shown_as_its_byte(player: Player) -> None:
    tokenizer = player.model.tokenizer
    first = int(tokenizer.encode("☃")[0])
    assert show_token(tokenizer, first) == "<E2>"


def test_only_a_token_that_is_text_can_be_taken(player: Player) -> None:
    """ "€" is three bytes, and so are its neighbours: the last byte decides which of them it is."""
    tokenizer = player.model.tokenizer
    first, second, last = map(int, tokenizer.encode("€"))
    other = int(tokenizer.encode("₭")[2])
    pieces = Pieces(tokenizer, tokenizer.encode("5 "))
    (letter,) = map(int, tokenizer.encode("z"))
    assert [pieces.preview(token) for token in (letter, first, last)] == ["z", None, None]
    assert pieces.add(first) == pieces.add(second) == ""
    assert [pieces.preview(token) for token in (last, other, letter, first)] == ["€", "₭", None, None]
    assert pieces.add(last) == "€", "a preview changes nothing"


def test_a_case_operator_cannot_be_taken_and_the_letter_after_it_is_a_capital() -> None:
    tokenizer = Tokenizer.train(["The sea and the ship. " * 200], 292, TokenizerConfig(case_operators=True))
    operator, *rest = map(int, tokenizer.encode("The"))
    assert tokenizer.name_operator(operator)
    pieces = Pieces(tokenizer)
    assert pieces.preview(operator) is None
    pieces.add(operator)
    assert str(pieces.preview(rest[0])).startswith("T")


def test_alternatives_say_what_taking_them_would_type(player: Player) -> None:
    lines = list(player.write("The sea", tokens=6, temperature=1.0, top_p=1.0, seed=2))[:-1]
    for line in lines:
        for other in line["likeliest"]:
            assert other["take"] in (None, other["text"])
    assert any(other["take"] for line in lines for other in line["likeliest"])


def test_names_are_short_and_differ(tmp_path: Path) -> None:
    folder = tmp_path / "demo-1"
    folder.mkdir()
    paths = [folder / "model.pbk", folder, tmp_path / "small.pbk", tmp_path / "other" / "small.pbk"]
    assert name_models(paths) == ["demo-1", "demo-1 (2)", "small", "small (2)"]
