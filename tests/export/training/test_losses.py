"""Losses of heads, drafts and EAGLE's drafter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edgespec.export.training.options import HEAD_DECAY, TrainOptions
from edgespec.export.training.windows import Windows
from tests.export.training.conftest import Train
from tests.support.eagle import Reference

pytestmark = pytest.mark.usefixtures("torch")

LENGTHS = [11, 7]  # of two texts; padding after the second one's end must not matter
TOKENS = np.random.default_rng(5).integers(2, 150, (2, 11))
Array = NDArray[np.float64]


def asked(**options: Any) -> TrainOptions:
    """Return the options of a training, for any method."""
    return TrainOptions("medusa", "", Path(), **options)


SMALL: dict[str, Any] = {"draft_hidden": 32, "draft_intermediate": 48, "draft_heads": 2, "seed": 1}  # a draft


@pytest.fixture
def learners(target: Any, torch: Any) -> Any:
    """Name and loss -> heads of random weights; all are far from the target, and from each other."""
    from edgespec.export.training.learners import Blockwise, EarlyExitHeads, Medusa

    def make(name: str, loss: Any) -> Any:
        torch.manual_seed(3)
        kind = {"blockwise": Blockwise, "exits": EarlyExitHeads}.get(name, Medusa)
        made: Any = kind(target, asked(loss=loss, heads=3, hidden_size=24, exits=(1, 1), own_lm_heads=name == "own"))
        with torch.no_grad():
            for value in made.parameters():
                value.normal_(std=0.3)
        return made

    return make


def log_softmax(logits: Array) -> Array:
    """Natural log-probabilities [vocab] of logits [vocab]."""
    shifted = logits - logits.max()
    return np.asarray(shifted - math.log(np.exp(shifted).sum()))


def kl_or_lk(wanted: Array, guess: Array, loss: str) -> float:
    """Compute a loss from probabilities and log-probabilities [vocab]; lk: arXiv 2602.23881, 4.4."""
    kl, overlap = -(wanted * guess).sum(), np.minimum(wanted, np.exp(guess)).sum()
    share = np.exp(-3 * overlap) if loss == "lk" else 1.0
    return float(share * kl + (1 - share) * (1 - overlap))


def mean_loss(logits: Array, model: Array, ahead: int, loss: str) -> float:  # [B, T, vocab] both
    """Compute the mean loss of predictions of the token ``ahead`` + 1 after the next one, over both texts."""
    losses = []
    for text, length in enumerate(LENGTHS):
        for at in range(min(length, logits.shape[1])):
            guess = log_softmax(logits[text, at])
            # the model says in the row of token at + ahead + 1 what the token after it is
            if loss != "ce" and at + ahead + 1 < length:
                losses.append(kl_or_lk(np.exp(log_softmax(model[text, at + ahead + 1])), guess, loss))
            if loss == "ce" and at + ahead + 2 < length:
                losses.append(-guess[TOKENS[text, at + ahead + 2]])
    return float(np.mean(losses))


def numpy(value: Any) -> Array:
    return np.asarray(value.detach().double().numpy())


def loss_of(learner: Any, torch: Any, lengths: list[int] = LENGTHS) -> float:
    tokens = torch.from_numpy(TOKENS)
    return float(learner(tokens, torch.tensor(lengths), learner.states(tokens)).detach())


def outputs(target: Any, torch: Any) -> tuple[Array, Array, Array]:
    """By transformers: the model's logits [B, T, vocab], its normed residual stream after layer 1, and after all."""
    found = target.model(torch.from_numpy(TOKENS), output_hidden_states=True)
    last = target.model.base_model(torch.from_numpy(TOKENS)).last_hidden_state
    return numpy(found.logits), numpy(target.norm(found.hidden_states[1])), numpy(last)


@pytest.mark.parametrize("loss", ["kl", "ce", "lk"])
@pytest.mark.parametrize("name", ["medusa", "own", "blockwise"])
def test_head_i_learns_what_comes_i_plus_two_tokens_on(
    learners: Any, target: Any, torch: Any, name: str, loss: str
) -> None:
    learner = learners(name, loss)
    model, _, last = outputs(target, torch)
    expected = 0.0
    for head in range(3):
        logits = numpy(learner.logits(head, learner.rows(torch.from_numpy(last).float())[head]))  # [B, T, vocab]
        expected += HEAD_DECAY**head * mean_loss(logits, model, head, loss)
    assert loss_of(learner, torch) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_a_head_beyond_the_end_of_every_text_learns_nothing(learners: Any, torch: Any, loss: str) -> None:
    learner = learners("own", loss)
    short = [3, 2] if loss == "kl" else [4, 3]  # for the first two heads
    both = loss_of(learner, torch, short)
    learner.lm_heads[2].data.mul_(2)
    assert loss_of(learner, torch, short) == both
    learner.lm_heads[1].data.mul_(2)
    assert loss_of(learner, torch, short) != both


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_an_exit_learns_what_the_model_says_at_the_same_token(
    learners: Any, target: Any, torch: Any, loss: str
) -> None:
    learner = learners("exits", loss)
    model, hidden, _ = outputs(target, torch)
    head, expected = numpy(target.lm_head), 0.0
    for weight in numpy(learner.weight):
        losses = []
        for text, length in enumerate(LENGTHS):
            for at in range(length):
                guess = log_softmax(head @ (weight @ hidden[text, at]))
                wanted = model[text, at]
                losses.append(
                    -(np.exp(log_softmax(wanted)) * guess).sum() if loss == "kl" else -guess[int(wanted.argmax())]
                )
        expected += float(np.mean(losses))
    assert loss_of(learner, torch) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("loss, share", [("kl", 0.0), ("kl", 0.3), ("ce", 1.0)])
def test_a_draft_learns_the_models_next_token_and_the_texts(target: Any, torch: Any, loss: Any, share: float) -> None:
    from edgespec.export.training.drafters import Draft

    learner = Draft(target, asked(loss=loss, ce_share=share, **SMALL))
    model, draft = outputs(target, torch)[0], numpy(learner.logits(torch.from_numpy(TOKENS)))
    soft, hard = [], []
    for text, length in enumerate(LENGTHS):
        for at in range(length):
            guess = log_softmax(draft[text, at])
            soft.append(-(np.exp(log_softmax(model[text, at])) * guess).sum())
            if at + 1 < length:
                hard.append(-guess[TOKENS[text, at + 1]])
    expected = (1 - share) * float(np.mean(soft)) + share * float(np.mean(hard))
    assert loss_of(learner, torch) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("start", [1, 4])
def test_right_guesses_of_a_draft_are_the_texts_next_tokens(target: Any, torch: Any, start: int) -> None:
    from edgespec.export.training.drafters import Draft
    from edgespec.export.training.save import rank_shares

    learner, texts = Draft(target, asked(**SMALL)), windows()
    logits = numpy(learner.logits(torch.from_numpy(texts.tokens)))
    assert rank_shares(learner, texts, start) == [shares_by_rank(logits, np.roll(texts.tokens, -1, 1), texts, start, 1)]


@pytest.mark.parametrize("width", [16, 64, 96])
def test_a_draft_starts_from_the_models_embedding(target: Any, width: int) -> None:
    """Its principal directions, each with a sign and all of one scale; the whole of it where that has room."""
    from edgespec.export.training.drafters import Draft

    theirs = numpy(target.model.get_input_embeddings().weight)
    assert theirs.shape[1] == 64
    learner = Draft(target, asked(**SMALL | {"draft_layers": 1, "draft_hidden": width}))
    ours = numpy(learner.tensors()["model.embed_tokens.weight"])
    if width >= 64:
        np.testing.assert_array_equal(ours, np.pad(theirs, ((0, 0), (0, width - 64))))
        return
    left, sizes, right = np.linalg.svd(theirs.astype(np.float64), full_matrices=False)
    expected = left[:, :width] * sizes[:width] * np.where(right[:width].sum(1) < 0, -1, 1)
    np.testing.assert_allclose(ours, expected * 0.05 / expected.std(ddof=1), atol=1e-4)
    assert numpy(learner.tensors()["model.layers.0.mlp.up_proj.weight"]).std() == pytest.approx(0.05, rel=0.1)


def test_a_draft_takes_matrices_of_its_own_shape_from_the_model(target: Any) -> None:
    from edgespec.export.training.drafters import Draft

    facts, theirs = target.facts, dict(target.model.named_parameters())
    learner = Draft(target, asked(draft_layers=1, draft_hidden=facts.hidden, draft_heads=facts.heads,
                                  draft_intermediate=facts.intermediate))  # fmt: skip
    for name, value in learner.tensors().items():
        np.testing.assert_array_equal(numpy(value), numpy(theirs[name]))


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_recomputing_changes_no_gradient(target: Any, torch: Any, share: float) -> None:
    from edgespec.export.training.drafters import Draft

    tokens, found = torch.from_numpy(TOKENS), list[Array]()
    for recompute in (False, True):
        learner = Draft(target, asked(gradient_checkpointing=recompute, ce_share=share, **SMALL))
        learner(tokens, torch.tensor(LENGTHS), learner.states(tokens)).backward()
        found.append(np.concatenate([numpy(each.grad).ravel() for each in learner.parameters()]))
    assert np.abs(found[0]).max() > 0
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


def test_the_rate_rises_then_falls_by_half_a_cosine() -> None:
    from edgespec.export.training.loop import rate_at, total_steps

    shares = [rate_at(step, 100, 0.1) for step in range(100)]
    assert shares[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert shares[10] == 1.0
    assert shares[55] == pytest.approx(0.505)  # half way down to a hundredth
    assert shares[40] == pytest.approx(0.01 + 0.99 * 0.75)  # cos(60 degrees) = 1 / 2
    assert 0.01 < shares[99] < 0.011
    assert rate_at(0, 1, 0.0) == 1.0
    assert total_steps(asked(batch=4, epochs=1.5), 10) == 4  # 15 windows in fours


def test_a_training_takes_the_steps_of_adamw_at_that_rate(
    train: Train, monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    """Each step again in numpy, from the gradients that the optimizer saw (arXiv 1711.05101, algorithm 2)."""
    from edgespec.export.training import loop

    real = loop.one_step
    first: list[Array] = []
    moments: dict[str, Any] = {"m": 0.0, "v": 0.0}
    norms: list[float] = []

    def one_step(model: Any, optimizer: Any, accelerator: Any, batch: Any, step: int) -> float:
        (weight, *_) = model.parameters()
        before = numpy(weight)
        value = real(model, optimizer, accelerator, batch, step)
        total = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
        norms.append(total)
        gradient = numpy(weight.grad)
        moments["m"] = 0.9 * moments["m"] + 0.1 * gradient
        moments["v"] = 0.99 * moments["v"] + 0.01 * gradient**2
        mean = moments["m"] / (1 - 0.9 ** (step + 1))
        spread = np.sqrt(moments["v"] / (1 - 0.99 ** (step + 1)))
        rate = 0.02 * loop.rate_at(step, 6, 0.5)
        first.append(np.abs(numpy(weight) - (before - rate * mean / (spread + 1e-8))).max())
        return value

    monkeypatch.setattr(loop, "one_step", one_step)
    train(lr=0.02, warmup=0.5)
    assert len(first) == 6
    assert max(first) < 1e-6
    assert max(norms) <= 1 + 1e-5  # gradients are clipped to this norm


def windows() -> Windows:
    """Return the two texts and eight more, so that they take two passes."""
    more = np.random.default_rng(6).integers(2, 150, (8, 9)).tolist()
    texts = [row[:length].tolist() for row, length in zip(TOKENS, LENGTHS, strict=True)]
    return Windows.of([*texts, *more], 11)


def shares_by_rank(logits: Array, wanted: NDArray[np.int64], texts: Windows, start: int, ahead: int) -> list[float]:
    """Compute the share of positions where the prediction of each rank is right.

    logits [B, <= T, vocab], wanted [B, T]; positions followed by fewer than ``ahead`` tokens of the text do not count.
    """
    from edgespec.export.training.save import RANKS

    hits, count = np.zeros(RANKS), 0
    for text, length in enumerate(texts.lengths.tolist()):
        for at in range(start - 1, min(length - ahead, logits.shape[1])):
            place = int((logits[text, at] > logits[text, at, int(wanted[text, at])]).sum())
            count += 1
            if place < RANKS:
                hits[place] += 1
    return [round(hit / count, 4) for hit in hits]


@pytest.mark.parametrize("start", [1, 4])
def test_right_guesses_by_rank(learners: Any, target: Any, torch: Any, start: int) -> None:
    from edgespec.export.training.save import rank_shares

    learner, texts = learners("medusa", "kl"), windows()
    hidden, expected = target.hidden(torch.from_numpy(texts.tokens)), []
    for head in range(3):
        logits = numpy(learner.logits(head, learner.rows(hidden)[head]))
        wanted = np.roll(texts.tokens, -head - 2, 1)
        expected.append(shares_by_rank(logits, wanted, texts, start, head + 2))
    assert sum(map(sum, expected)) > 0
    assert rank_shares(learner, texts, start) == expected


@pytest.mark.parametrize("start", [1, 4])
def test_right_guesses_of_exits_are_the_models_own(learners: Any, target: Any, torch: Any, start: int) -> None:
    from edgespec.export.training.save import rank_shares

    learner, texts = learners("exits", "kl"), windows()
    found = target.model(torch.from_numpy(texts.tokens), output_hidden_states=True)
    hidden, best = numpy(target.norm(found.hidden_states[1])), found.logits.argmax(-1).numpy()
    expected = [
        shares_by_rank(hidden @ weight.T @ numpy(target.lm_head).T, best, texts, start, 1)
        for weight in numpy(learner.weight)
    ]
    assert sum(map(sum, expected)) > 0
    assert rank_shares(learner, texts, start) == expected


@pytest.mark.parametrize("start", [1, 4])
def test_acceptance_of_a_draft(target: Any, torch: Any, start: int) -> None:
    from edgespec.export.training.save import draft_acceptance

    texts = windows()
    noise = torch.randn(150 + 10, 160, generator=torch.Generator().manual_seed(2))

    def draft(tokens: Any) -> Any:
        """Add noise to the model's own logits of ``tokens``, so that some of its guesses agree and some do not."""
        return target.logits(target.hidden(tokens)) + 2 * noise[tokens]

    tokens = torch.from_numpy(texts.tokens)
    p, q = numpy(target.model(tokens).logits), numpy(draft(tokens))
    overlap, same = [], []
    for text, length in enumerate(texts.lengths.tolist()):
        for at in range(start - 1, length - 1):
            overlap.append(np.minimum(np.exp(log_softmax(p[text, at])), np.exp(log_softmax(q[text, at]))).sum())
            same.append(p[text, at].argmax() == q[text, at].argmax())
    found = draft_acceptance(draft, target, texts, start)
    assert found["positions"] == len(same)
    assert found["overlap"] == pytest.approx(np.mean(overlap), abs=1e-4)
    assert found["agreement"] == pytest.approx(np.mean(same), abs=1e-4)
    assert 0 < found["agreement"] < 1


TAPPED, STEPS = (1, 2), 3


@pytest.fixture
def learner(target: Any, torch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from edgespec.export.training.drafters import Eagle

    monkeypatch.setattr("edgespec.export.training.learners.choose_taps", lambda layers: TAPPED)
    made = Eagle(target, asked(heads=STEPS, hidden_size=48, seed=4))
    with torch.no_grad():
        for norm in made.norms.values():
            norm.normal_(1.0, 0.3)
    return made


def chains(learner: Any, folder: Path, torch: Any, tokens: Any) -> Any:
    """Logits [B, N, steps, vocab]: row i has seen tokens up to i + 1; what it is fed after that is the text."""
    save_file({name: value.detach().numpy() for name, value in learner.tensors().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(learner.described()), "utf-8")
    drafter, model = Reference(folder), learner.target.model
    states = model(torch.from_numpy(tokens), output_hidden_states=True).hidden_states
    embedded, taps = numpy(states[0]), np.concatenate([numpy(states[at]) for at in TAPPED], -1)
    count = tokens.shape[1] - 1 - STEPS
    return np.array(
        [
            [drafter.logits(text[: at + 2], tap[: at + 1], text[at + 2 : at + 1 + STEPS]) for at in range(count)]
            for text, tap in zip(embedded, taps, strict=True)
        ]
    )


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_a_chain_learns_what_comes_after_what_it_is_fed(
    learner: Any, target: Any, torch: Any, tmp_path: Path, loss: Any
) -> None:
    learner.loss = loss
    logits, model = chains(learner, tmp_path, torch, TOKENS), numpy(target.model(torch.from_numpy(TOKENS)).logits)
    expected = 0.0
    for step in range(STEPS):
        expected += HEAD_DECAY**step * mean_loss(logits[:, :, step], model, step, loss)
    assert loss_of(learner, torch) == pytest.approx(expected, rel=1e-4)


def test_lk_and_d_pace_are_the_papers(torch: Any) -> None:
    """LK: lambda KL + (1 - lambda) TV, lambda = exp(-3 overlap) without gradient; D-PACE: equations 7 and 8."""
    from edgespec.export.training.losses import guess_losses, round_weights

    random = np.random.default_rng(7)
    logits, wanted = random.standard_normal((4, 9)), random.dirichlet(np.ones(9), 4)
    guesses = np.exp([log_softmax(row) for row in logits])
    overlap = np.minimum(guesses, wanted).sum(1)
    kl, share = -(wanted * np.log(guesses)).sum(1), np.exp(-3 * overlap)
    given = torch.tensor(logits, requires_grad=True)
    tokens = torch.arange(4)  # of a text: nothing overlaps with a token
    torch.testing.assert_close(guess_losses(given, tokens, "lk"), guess_losses(given, tokens, "ce"))
    found = guess_losses(given, torch.tensor(wanted), "lk")
    np.testing.assert_allclose(numpy(found), share * kl + (1 - share) * (1 - overlap), rtol=1e-9)
    found[0].backward()
    towards_kl, less = guesses[0] - wanted[0], guesses[0] < wanted[0]
    towards_tv = -guesses[0] * (less - (guesses[0] * less).sum())
    np.testing.assert_allclose(numpy(given.grad)[0], share[0] * towards_kl + (1 - share[0]) * towards_tv, atol=1e-9)

    losses, valid = random.random((2, 5, 3)), random.random((2, 5, 3)).cumsum(-1) < 1.5
    weights = numpy(round_weights(torch.tensor(losses), torch.tensor(valid), torch.tensor([1.0, 0.5, 0.25]), "d-pace"))
    expected = np.zeros(losses.shape)
    for i, j in np.ndindex(2, 5):
        smooth = [(0.5 + 0.5 * np.exp(-losses[i, j, k])) * valid[i, j, k] for k in range(3)]
        for k in range(3):
            expected[i, j, k] = sum(np.prod(smooth[: m + 1]) for m in range(k, 3)) * valid[i, j, k]
    assert valid.any((0, 1)).all()
    assert not valid.all()
    np.testing.assert_allclose(weights / weights.sum(), expected / expected.sum(), rtol=1e-6)
    assert weights.sum() == pytest.approx(1.75)


def test_right_guesses_of_a_chain(learner: Any, torch: Any, tmp_path: Path) -> None:
    from edgespec.export.training.save import rank_shares

    texts = windows()
    logits = chains(learner, tmp_path, torch, texts.tokens)
    rows, expected = logits.shape[1], []
    for step in range(STEPS):
        wanted = np.roll(texts.tokens, -step - 2, 1)[:, :rows]
        expected.append(shares_by_rank(logits[:, :, step], wanted, texts, 2, step + 2))
    assert sum(map(sum, expected)) > 0
    assert rank_shares(learner, texts, 2) == expected
