import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning.channel import Downlink, Uplink, noise_std_for

D = 10**6


def models_of(K, d, dtype=torch.float32):
    return torch.randn((K, d), generator=torch.Generator().manual_seed(1), dtype=dtype)


def test_noise_has_the_deviation_asked_for_not_the_variance():
    models = models_of(3, D)
    sigma = torch.tensor([0.1, 2.0, 0.03])
    received, _ = Uplink(sigma, 0.0, seed=0)(models, 1)
    noise = (received - models).double()
    torch.testing.assert_close(noise.std(dim=1), sigma.double(), rtol=0.01, atol=0)
    assert (noise.mean(dim=1).abs() < 4 * sigma / math.sqrt(D)).all()


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_missing_share_and_what_arrives(rate):
    models = models_of(2, D)
    received, mask = Uplink(0.0, rate, seed=3)(models, 0)
    assert mask.dtype == torch.bool and mask.shape == models.shape
    share = 1 - mask.double().mean(dim=1)
    assert ((share - rate).abs() < 3 * math.sqrt(rate * (1 - rate) / D)).all()
    assert torch.equal(received[mask], models[mask])
    assert torch.count_nonzero(received[~mask]) == 0


def test_noise_is_there_where_nothing_arrived():
    received, mask = Uplink(0.5, 0.3, seed=0)(torch.full((1, D), 7.0), 0)
    torch.testing.assert_close(received[~mask].double().std(), torch.tensor(0.5).double(), rtol=0.01, atol=0)
    assert abs(float(received[~mask].double().mean())) < 4 * 0.5 / math.sqrt(0.3 * D)


def test_what_is_lost_is_lost_even_if_not_finite():
    received, mask = Uplink(0.1, 0.5, seed=0)(torch.full((2, 50), float("nan")), 0)
    assert received[~mask].isfinite().all() and received[mask].isnan().all()


def test_everything_arrives_unchanged_over_a_perfect_channel():
    models = models_of(3, 10)
    received, mask = Uplink(0.0, 0.0, seed=0)(models, 4)
    assert torch.equal(received, models) and received.data_ptr() != models.data_ptr()
    assert mask.shape == models.shape and mask.dtype == torch.bool and mask.all()


def test_fresh_for_every_client_round_and_seed():
    models = torch.zeros((3, 2000))
    sent = {
        (seed, round, client): (received[client], mask[client])
        for seed in (0, 1)
        for round in (0, 1)
        for received, mask in [Uplink(1.0, 0.2, seed=seed)(models, round)]
        for client in range(3)
    }
    keys = list(sent)
    for i, a in enumerate(keys):
        for b in keys[:i]:
            correlation = torch.corrcoef(torch.stack([sent[a][0], sent[b][0]]))[0, 1]
            assert correlation.abs() < 5 / math.sqrt(2000), (a, b)
            assert not torch.equal(sent[a][1], sent[b][1]), (a, b)


def test_reproducible_whatever_was_drawn_before():
    models = models_of(4, 100)
    uplink = Uplink(0.3, 0.1, seed=2)
    first = uplink(models, 5)
    uplink(models, 6)
    torch.manual_seed(0)
    again = Uplink(0.3, 0.1, seed=2)(models, 5)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 5))
def test_rows_do_not_depend_on_order_or_split_over_processes(order, cut):
    models = models_of(6, 40)
    uplink = Uplink(torch.arange(6) / 10, 0.25, seed=1)
    whole, whole_mask = uplink(models, 3)
    for ids in (order[:cut], order[cut:]):
        part, part_mask = uplink(models[ids], 3, clients=ids)
        assert torch.equal(part, whole[ids]) and torch.equal(part_mask, whole_mask[ids])


def test_what_is_lost_does_not_hang_on_the_programs_default_type():
    models, uplink = models_of(2, 40), Uplink(0.1, 0.25, seed=1)
    _, mask = uplink(models, 3)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(uplink(models, 3)[1], mask)
    finally:
        torch.set_default_dtype(torch.float32)


def test_rates_share_the_noise_and_losses_are_nested():
    models = torch.zeros((2, 5000))
    noises, masks = zip(*[Uplink(1.0, rate, seed=0)(models, 0) for rate in (0.0, 0.05, 0.1)], strict=True)
    assert torch.equal(noises[0], noises[1]) and torch.equal(noises[1], noises[2])
    assert (masks[2] <= masks[1]).all() and masks[2].sum() < masks[1].sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_models_are_left_alone_and_outputs_own_their_memory(dtype):
    models = models_of(8, 30, dtype).t().contiguous().t()[::2]  # a strided view
    kept = models.clone()
    received, mask = Uplink(0.1, 0.2, seed=0)(models, 0)
    assert received.dtype == dtype and received.is_contiguous()
    received.fill_(5)
    mask.fill_(False)
    assert torch.equal(models, kept)


def test_no_gradient_passes():
    received, _ = Uplink(0.1, 0.1, seed=0)(torch.ones((2, 3), requires_grad=True), 0)
    assert not received.requires_grad


def test_double_models_get_noise_in_double_precision():
    models = torch.zeros((1, 1000), dtype=torch.float64)
    received, _ = Uplink(1.0, 0.0, seed=0)(models, 0)
    assert not torch.equal(received, received.float().double())


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"noise_std": -0.1}, "noise_std is -0.1"),
        ({"noise_std": float("nan")}, "noise_std"),
        ({"noise_std": torch.tensor([0.1, float("inf")])}, "noise_std"),
        ({"noise_std": torch.ones(2, 2)}, "shape"),
        ({"noise_std": 0.1, "missing_rate": -0.1}, "missing_rate is -0.1"),
        ({"noise_std": 0.1, "missing_rate": 1.0}, "missing_rate is 1.0; it must be below 1"),
        ({"noise_std": 0.1, "missing_rate": float("nan")}, "missing_rate"),
    ],
)
def test_bad_settings_are_named(settings_, message):
    with pytest.raises(ValueError, match=message):
        Uplink(**settings_)


@pytest.mark.parametrize(
    ("models", "clients", "message"),
    [
        (torch.ones(3), None, "floating-point"),
        (torch.ones((2, 3), dtype=torch.int64), None, "int64"),
        (torch.ones((3, 3)), None, r"client 2 .* noise_std has 2"),
        (torch.ones((2, 3)), [0], "names 1 clients, but models has 2 rows"),
        (torch.ones((2, 3)), [0, -1], "start at 0"),
    ],
)
def test_models_that_do_not_fit_are_refused(models, clients, message):
    with pytest.raises(ValueError, match=message):
        Uplink(torch.tensor([0.1, 0.2]), 0.0, seed=0)(models, 0, clients)


def test_noise_level_is_relative_to_the_mean_magnitude():
    assert noise_std_for(torch.tensor([1.0, -3.0, 0.0, 4.0]), 0.1) == pytest.approx(0.2)
    assert noise_std_for(torch.ones(3), 0) == 0
    with pytest.raises(ValueError, match=r"channel\.noise is -1"):
        noise_std_for(torch.ones(3), -1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_same_numbers_on_the_gpu():
    models = models_of(3, 1000)
    uplink = Uplink(0.1, 0.1, seed=0)
    received, mask = uplink(models, 0)
    on_gpu, gpu_mask = uplink(models.cuda(), 0)
    assert on_gpu.is_cuda and gpu_mask.is_cuda
    assert torch.equal(mask, gpu_mask.cpu())
    torch.testing.assert_close(on_gpu.cpu(), received, rtol=0, atol=1e-7)


def test_the_way_back_has_its_own_noise_and_what_it_loses_stays():
    sent, held, clients = models_of(2, D), models_of(2, D).neg(), [3, 7]
    received = Downlink(0.5, 0.2, seed=4)(sent, held, 2, clients)
    kept = received == held
    assert float(kept.double().mean()) == pytest.approx(0.2, abs=0.002)
    noise = (received - sent)[~kept].double()
    assert float(noise.std()) == pytest.approx(0.5, rel=0.01) and abs(float(noise.mean())) < 0.002
    up, mask = Uplink(0.5, 0.2, seed=4)(sent, 2, clients)
    both = ~kept & mask
    assert abs(float(torch.corrcoef(torch.stack([noise[both[~kept]], (up - sent)[both].double()]))[0, 1])) < 0.01
    assert float(both.double().mean()) == pytest.approx(0.64, abs=0.002)  # what each loses is independent
    for row, client in enumerate(clients):  # whichever others are sent theirs with it
        alone = Downlink(0.5, 0.2, seed=4)(sent[row : row + 1], held[row : row + 1], 2, [client])
        assert torch.equal(alone[0], received[row])
    assert Downlink().is_perfect and not Downlink(0.1).is_perfect and not Downlink(0, 0.1).is_perfect
