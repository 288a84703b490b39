"""What methods add to the clients' loss: values and gradients by hand, and the sign."""

import pytest
import torch
from torch.nn.functional import cosine_similarity

from jgesr_lightning.regularisers import CosineDissimilarity, Proximal


def gradient(term, x, sent):
    x = x.clone().requires_grad_()
    term(x, sent).sum().backward()
    return x.grad


def test_proximal_value_and_gradient():
    x, sent = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.0, 1.0, 0.5])
    assert float(Proximal(0.1)(x, sent)) == pytest.approx(0.05 * 10)
    torch.testing.assert_close(gradient(Proximal(0.1), x, sent), 0.1 * (x - sent))


def test_cosine_value_and_gradient():
    torch.manual_seed(0)
    x, sent = torch.randn(7).double(), torch.randn(7).double()
    cosine = (x @ sent) / (x.norm() * sent.norm())
    assert float(CosineDissimilarity(0.3)(x, sent)) == pytest.approx(-0.3 * float(cosine))
    by_hand = -0.3 * (sent / (x.norm() * sent.norm()) - cosine * x / x.norm() ** 2)
    torch.testing.assert_close(gradient(CosineDissimilarity(0.3), x, sent), by_hand)


@pytest.mark.parametrize("term", [Proximal(1.0), CosineDissimilarity(1.0)])
def test_descending_a_term_brings_the_model_towards_what_was_sent(term):
    torch.manual_seed(0)
    x, sent = torch.randn(50), torch.randn(50)
    before, penalty = cosine_similarity(x, sent, dim=0), float(term(x, sent))
    for _ in range(5):
        x = x - 0.1 * gradient(term, x, sent)
    assert cosine_similarity(x, sent, dim=0) > before
    assert float(term(x, sent)) < penalty


@pytest.mark.parametrize("term", [Proximal(0.7), CosineDissimilarity(0.7)])
def test_all_clients_at_once_are_one_call(term):
    x, sent = torch.randn(3, 2, 9), torch.randn(3, 2, 9)
    together = term(x, sent)
    assert together.shape == (3, 2)
    torch.testing.assert_close(together[1, 0], term(x[1, 0], sent[1, 0]))
    torch.testing.assert_close(gradient(term, x, sent)[2, 1], gradient(term, x[2, 1], sent[2, 1]))


@pytest.mark.parametrize("term", [Proximal(0.7), CosineDissimilarity(0.7)])
def test_zero_vectors_give_finite_gradients(term):
    zero = torch.zeros(4)
    for x, sent in ((zero, zero), (zero, torch.ones(4)), (torch.ones(4), zero), (torch.ones(4), torch.ones(4))):
        assert torch.isfinite(term(x, sent)) and torch.isfinite(gradient(term, x, sent)).all()


@pytest.mark.parametrize(("kind", "name"), [(Proximal, "mu"), (CosineDissimilarity, "lam")])
@pytest.mark.parametrize("value", [-1, "0.1", None, True, float("nan")])
def test_wrong_weights_are_refused_by_name(kind, name, value):
    with pytest.raises(ValueError, match=f"^{name} is "):
        kind(value)


def test_they_name_themselves():
    assert repr(Proximal(0.01)) == "Proximal(mu=0.01)"
    assert repr(CosineDissimilarity(0.5)) == "CosineDissimilarity(lam=0.5)"
