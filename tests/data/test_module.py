import pytest
import torch

from jgesr_lightning.data import DataError, FederatedDataModule


def ready(**settings):
    data = FederatedDataModule("synthetic", **{"num_clients": 6, "kappa": 0.3, **settings})
    data.setup("fit")
    return data


@pytest.fixture(scope="module")
def data():
    return ready()


def test_shapes_and_counts(data):
    assert (data.num_classes, data.input_shape) == (10, (1, 28, 28))
    assert data.sizes.shape == data.test_sizes.shape == (6,) and data.class_counts.shape == (6, 10)
    assert int((data.sizes + data.test_sizes).sum()) == 4000
    assert torch.equal(data.class_counts.sum(dim=1), data.sizes + data.test_sizes)
    assert torch.equal(data.class_counts.sum(dim=0), torch.full((10,), 400))
    for k in range(6):
        x, y = data.train_tensors(k)
        assert x.shape == (data.sizes[k], 1, 28, 28) and x.dtype == torch.float32 and x.is_contiguous()
        assert y.shape == (data.sizes[k],) and y.dtype == torch.int64
        both = torch.cat([y, data.test_tensors(k)[1]])
        assert torch.equal(torch.bincount(both, minlength=10), data.class_counts[k])


def test_every_sample_is_somebodys_once(data):
    indices = [torch.from_numpy(part(k)) for k in range(6) for part in (data.train_indices, data.test_indices)]
    assert torch.equal(torch.cat(indices).sort().values, torch.arange(4000))


def test_all_clients_together_have_mean_0_and_deviation_1(data):
    x = torch.cat([part(k)[0] for k in range(6) for part in (data.train_tensors, data.test_tensors)])
    assert abs(float(x.mean())) < 1e-4
    assert abs(float(x.std()) - 1) < 1e-4


def test_about_a_quarter_is_for_testing_and_its_labels_were_trained_on(data):
    share = data.test_sizes / (data.sizes + data.test_sizes)
    assert (share - 0.25).abs().max() < 0.02
    for k in range(6):
        assert set(data.test_tensors(k)[1].tolist()) <= set(data.train_tensors(k)[1].tolist())


def test_the_same_seed_gives_the_same_data_and_another_does_not(data):
    again, other = ready(), ready(seed=1)
    assert torch.equal(data.train_tensors(2)[0], again.train_tensors(2)[0])
    assert torch.equal(data.class_counts, again.class_counts)
    assert not torch.equal(data.class_counts, other.class_counts)


def test_fraction_keeps_the_class_balance():
    data = ready(fraction=0.1)
    assert torch.equal(data.class_counts.sum(dim=0), torch.full((10,), 40))
    mean = torch.cat([data.train_tensors(k)[0] for k in range(6)]).mean()
    assert 0 < abs(float(mean)) < 0.2  # still the statistics of the whole set


def test_callers_own_what_they_get(data):
    first, labels = data.train_tensors(0)
    kept = first.clone(), labels.clone()
    first.zero_()
    labels.zero_()
    data.train_indices(0).fill(0)
    again = data.train_tensors(0)
    assert torch.equal(again[0], kept[0]) and torch.equal(again[1], kept[1])


def test_double_precision(data):
    x, _ = data.test_tensors(1, dtype=torch.float64)
    assert x.dtype == torch.float64
    torch.testing.assert_close(x.float(), data.test_tensors(1)[0], rtol=1e-4, atol=1e-5)


def test_loader_shuffles_all_samples_of_one_client(data):
    batches = list(data.client_loader(3, batch_size=16))
    x = torch.cat([batch for batch, _ in batches])
    expected, _ = data.train_tensors(3)
    assert len(batches[0][0]) == 16 and x.shape == expected.shape
    assert not torch.equal(x, expected)
    torch.testing.assert_close(x.sum(dim=0), expected.sum(dim=0), rtol=1e-3, atol=1e-3)


def test_setup_twice_is_setup_once(data):
    before = data.class_counts
    data.setup()
    assert data.class_counts is before


def test_misuse_is_named(data):
    with pytest.raises(RuntimeError, match="setup"):
        FederatedDataModule("synthetic").train_tensors(0)
    for client in (6, -1):
        with pytest.raises(IndexError, match=f"client {client} is not one of 0 to 5"):
            data.train_tensors(client)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_samples": 1}, r"data\.min_samples is 1; it must be at least 2"),
        ({"num_clients": 500}, r"4000 samples cannot be split .*kappa=0.3.* over 500 clients with at least 10"),
        ({"kappa": 0.0}, "kappa is 0.0"),
        ({"fraction": 0.0}, "fraction is 0.0"),
        ({"test_share": 1.0}, "test_share is 1.0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ready(**settings)


def test_no_data_is_a_value_error(tmp_path, own_cache):
    root = tmp_path / "data"
    root.mkdir(mode=0o555)
    with pytest.raises(DataError, match="JGESR_DATA") as caught:
        FederatedDataModule("mnist", root).setup()
    assert isinstance(caught.value, ValueError)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_tensors_on_the_gpu(data):
    x, y = data.train_tensors(0, device="cuda")
    assert x.is_cuda and y.is_cuda
    torch.testing.assert_close(x.cpu(), data.train_tensors(0)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.data
def test_mnist_with_the_settings_of_the_paper(data_root):
    data = FederatedDataModule("mnist", data_root("mnist"), num_clients=20, kappa=0.05)
    data.setup()
    assert int((data.sizes + data.test_sizes).sum()) == 60000
    assert int((data.sizes + data.test_sizes).min()) >= 10
    x, y = data.train_tensors(int(data.sizes.argmin()))
    assert x.shape[1:] == (1, 28, 28) and y.max() < 10
