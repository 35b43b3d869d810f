import numpy as np
import pytest

from jax_titan.data.split import choose_validation, cut_byte


def digests(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.9])
def test_validation_reaches_its_share_and_exceeds_it_by_less_than_a_document(fraction: float):
    sizes = np.random.default_rng(1).integers(1, 1000, 2000)
    chosen = choose_validation(sizes, digests(2000), fraction)
    share = sizes[chosen].sum() / sizes.sum()
    assert fraction <= share < fraction + 1000 / sizes.sum()


def test_the_choice_does_not_depend_on_the_order_of_documents():
    sizes = np.random.default_rng(1).integers(1, 1000, 300)
    names = digests(300)
    shuffle = np.random.default_rng(2).permutation(300)
    chosen = choose_validation(sizes, names, 0.1)
    np.testing.assert_array_equal(choose_validation(sizes[shuffle], names[shuffle], 0.1), chosen[shuffle])


@pytest.mark.parametrize("fraction", [1e-9, 0.05, 0.5, 0.999])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_each_side_has_a_document(count: int, fraction: float):
    for seed in range(20):
        chosen = choose_validation(np.full(count, 10), digests(count, seed), fraction)
        assert 0 < chosen.sum() < count


def test_a_document_larger_than_the_share_is_the_last_resort():
    for seed in range(20):
        sizes = np.array([900, 60, 800])
        assert choose_validation(sizes, digests(3, seed), 0.03).tolist() == [False, True, False]


def test_equal_documents_are_on_one_side():
    names = digests(50).repeat(4)
    chosen = choose_validation(np.full(200, 10), names, 0.07).reshape(50, 4)
    assert (chosen.all(axis=1) | ~chosen.any(axis=1)).all()


def test_an_only_document_is_cut_after_the_line_end_nearest_to_the_share():
    text = b"x" * 79 + b"\n" + b"y" * 9 + b"\n" + b"z" * 9 + b"\n"
    assert cut_byte(text, 0.1) == 90
    assert cut_byte(text, 0.14) == 90
    assert cut_byte(text, 0.16) == 80
    assert cut_byte(b"ab\n" * 100, 0.05) == 285


def test_a_line_end_far_from_the_share_is_not_taken():
    title = b"Title\n" + b"x" * 994
    assert cut_byte(title, 0.05) == 950


def test_a_cut_never_splits_a_character():
    for text in ("é" * 50, "漢" * 50, "🐋" * 50, "a🐋", "🐋a", "ab"):
        for fraction in (1e-6, 0.05, 0.33, 0.5, 0.999):
            encoded = text.encode()
            at = cut_byte(encoded, fraction)
            assert at is not None
            assert 0 < at < len(encoded)
            assert encoded[:at].decode() + encoded[at:].decode() == text


@pytest.mark.parametrize("text", ["a", "\n", "🐋"])
def test_a_single_character_has_no_cut(text: str):
    assert cut_byte(text.encode(), 0.5) is None
