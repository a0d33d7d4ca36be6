"""The instruments of benchmarks/importance_bias.py: gradients, variances, bias without noise."""

import numpy as np
import pytest
from benchmarks.importance_bias import Net, Passed, batch_variance, square_of_mean


def passed_of(num_samples: int) -> tuple[Net, np.ndarray, np.ndarray, Passed]:
    rng = np.random.default_rng(5)
    pixels = rng.normal(size=(num_samples, 9)).astype(np.float64)
    labels = rng.integers(0, 10, num_samples)
    net = Net.fresh(9)
    net = Net(net.first.astype(np.float64), net.second.astype(np.float64))
    return net, pixels, labels, net.forward(pixels, labels)


def test_gradients_are_those_of_the_weighted_mean_loss() -> None:
    net, pixels, labels, passed = passed_of(20)
    ids, weights = np.array([3, 3, 7, 11]), np.array([0.5, 0.5, 2.0, 1.5])
    gradient = passed.gradient(ids, weights)
    rng = np.random.default_rng(0)
    for layer, place in ((net.first, 0), (net.second, net.first.size)):
        for at in rng.integers(0, layer.size, 5):
            losses = []
            for step in (1e-6, -2e-6):
                layer.ravel()[at] += step
                losses.append((weights * net.forward(pixels, labels).losses[ids]).mean())
            layer.ravel()[at] += 1e-6
            slope = (losses[0] - losses[1]) / 2e-6
            assert gradient[place + at] == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("bias", [0.0, 0.3])
def test_the_square_of_a_mean_is_estimated_without_the_noise(bias: float) -> None:
    rng = np.random.default_rng(1)
    estimates, errors = [], []
    for _ in range(200):
        draws = rng.normal(size=(40, 30))
        draws[:, 0] += bias
        estimate, error = square_of_mean(draws @ draws.T)
        estimates.append(estimate)
        errors.append(error)
    # The squared mean itself would be 30/40 too large.
    assert np.mean(estimates) == pytest.approx(bias**2, abs=0.04)
    assert np.mean(errors) == pytest.approx(np.std(estimates), rel=0.5)


def test_a_batch_varies_by_its_size_and_by_the_spread_of_gradients() -> None:
    _, _, _, passed = passed_of(64 * 8 * 40)
    count = len(passed.losses)
    each = [passed.gradient(np.array([i]), np.ones(1)) for i in range(2000)]
    found = batch_variance(passed, np.arange(count), np.ones(count))
    assert found == pytest.approx(np.var(each, axis=0).sum() / 64, rel=0.1)
