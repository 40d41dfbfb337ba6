from functools import partial

import torch

from workers.models import PRESETS, Decoder, chunks_of, initial_value, mean_loss, resolve

SHAPE = PRESETS["tiny"]


def filled() -> Decoder:
    model = Decoder(SHAPE)
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            size = tuple(parameter.shape)
            parameter.copy_(initial_value(fqn, size, seed=1, num_layers=SHAPE.num_layers))
    return model


def test_a_position_does_not_see_later_ones() -> None:
    """A model that sees the token it predicts learns nothing, with a splendid loss."""
    tokens = torch.arange(24).reshape(1, 24)
    changed = tokens.clone()
    changed[0, 12:] += 5

    before, after = filled()(tokens), filled()(changed)

    assert torch.equal(before[0, :12], after[0, :12])
    assert not torch.allclose(before[0, 12:], after[0, 12:])


def test_positions_matter() -> None:
    """Without rotary positions attention sees a set of tokens, not a row of them."""
    tokens = torch.tensor([[1, 2, 3, 4, 9]])
    swapped = torch.tensor([[2, 1, 3, 4, 9]])

    assert not torch.allclose(filled()(tokens)[0, -1], filled()(swapped)[0, -1])


def test_an_untrained_model_knows_nothing() -> None:
    """Its loss is that of a uniform guess, or the initial values are too large."""
    tokens = torch.randint(0, SHAPE.vocab_size, (8, 33))

    loss = mean_loss(filled()(tokens[:, :-1]), tokens[:, 1:])

    assert abs(loss.item() - torch.tensor(float(SHAPE.vocab_size)).log().item()) < 0.1


def test_initial_values_depend_on_name_and_seed_only() -> None:
    """Ranks hold different parameters, so a running generator would give different models."""
    first = initial_value("layers.0.ffn.up.weight", (8, 4), seed=1, num_layers=2)
    torch.manual_seed(99)
    again = initial_value("layers.0.ffn.up.weight", (8, 4), seed=1, num_layers=2)
    other = initial_value("layers.1.ffn.up.weight", (8, 4), seed=1, num_layers=2)

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_loss_in_chunks_is_that_of_all_logits() -> None:
    """Chunks are added up and divided once; the last one is shorter."""
    size = 1 << 16
    tokens, targets = (torch.randint(0, size, (1, 520)) for _ in range(2))
    model = Decoder(resolve("tiny", {"vocab_size": size}))
    assert chunks_of(520, size) == 2
    whole = torch.nn.functional.cross_entropy(model(tokens)[0], targets[0])
    wanted = torch.autograd.grad(whole, list(model.parameters()))
    for loss in (model(tokens, targets), mean_loss(model(tokens), targets)):
        found = torch.autograd.grad(loss, list(model.parameters()))
        assert torch.allclose(loss, whole, rtol=1e-6)
        assert all(map(partial(torch.allclose, rtol=1e-5, atol=1e-7), found, wanted))


def test_a_loss_keeps_few_logits() -> None:
    """Whole ones would be kept for the backward pass, in float32 and as they are."""
    size, kept = 1 << 16, list[int]()
    model = Decoder(resolve("tiny", {"vocab_size": size}))
    tokens = torch.zeros(1, 1025, dtype=torch.int64)

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model(tokens[:, :-1], tokens[:, 1:])
    assert max(kept) < 64 * size, "the weight of the output"
