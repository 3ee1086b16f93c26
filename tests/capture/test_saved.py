import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sosie
from sosie.capture import SiteError, open_activations
from sosie.files import DamagedFile


@pytest.fixture
def arrays():
    make = np.random.default_rng(0)
    return {
        "layer10": make.standard_normal((6, 4)).astype(np.float32),
        "layer2": make.standard_normal((6, 3, 2, 2)).astype(np.float16),
        "tokens": np.asfortranarray(make.standard_normal((6, 5, 2))),
    }


def write(path, arrays, how):
    if how == "safetensors":
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        save_file(tensors, path, metadata={"sites": json.dumps(list(arrays))})
    else:
        {"npz": np.savez, "compressed": np.savez_compressed}[how](path, **arrays)
    return path


@pytest.fixture(params=["dict", "tensors", "npz", "compressed", "safetensors"])
def opened(request, arrays, tmp_path):
    if request.param == "dict":
        return open_activations(arrays)
    if request.param == "tensors":
        return open_activations({name: torch.from_numpy(array) for name, array in arrays.items()})
    suffix = "safetensors" if request.param == "safetensors" else "npz"
    return open_activations(write(tmp_path / f"acts.{suffix}", arrays, request.param))


def test_every_source_gives_the_same_rows(opened, arrays):
    assert [site.label for site in opened.sites] == list(arrays)
    assert opened.n == 6
    assert [site.channels_last for site in opened.sites] == [True, False, True]
    assert [site.shape for site in opened.sites] == [(4,), (3, 2, 2), (5, 2)]
    for label, array in arrays.items():
        for start, stop in ((0, 6), (2, 3), (4, 6)):
            found = opened.activation(label, start, stop)
            np.testing.assert_array_equal(found.numpy(), array[start:stop])
    flat = opened.rows("layer2", 1, 4)
    assert flat.dtype == torch.float32
    np.testing.assert_array_equal(flat.numpy(), arrays["layer2"][1:4].reshape(3, 12).astype(np.float32))
    assert opened.rows("layer2", 0, 6, rule="positions").shape == (24, 3)
    np.testing.assert_allclose(opened.rows("tokens", 0, 6, rule="mean").numpy(), arrays["tokens"].mean(1))


def test_unknown_sites_and_rows_are_refused(opened):
    with pytest.raises(KeyError, match="did you mean 'layer10'"):
        opened.rows("layer1", 0, 2)
    with pytest.raises(IndexError, match="inputs 4 to 7 of 6 at site 'tokens'"):
        opened.rows("tokens", 4, 7)
    with pytest.raises(IndexError):
        opened.rows("tokens", 3, 3)


def test_a_large_npz_is_mapped_and_not_read(tmp_path):
    import tracemalloc

    path = tmp_path / "large.npz"
    np.savez(path, a=np.zeros((2000, 2000)))
    tracemalloc.start()
    opened = open_activations(path)
    opened.rows("a", 10, 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_safetensors_without_an_order_are_sorted_by_number(tmp_path):
    save_file({f"layer{i}": torch.zeros(2, 2) for i in (10, 2, 1)}, tmp_path / "a.safetensors")
    assert [site.label for site in open_activations(tmp_path / "a.safetensors").sites] == [
        "layer1",
        "layer2",
        "layer10",
    ]


def test_bfloat16_and_big_endian_are_read(tmp_path):
    save_file({"a": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    assert open_activations(tmp_path / "a.safetensors").rows("a", 0, 2).dtype == torch.float32
    np.savez(tmp_path / "b.npz", b=np.ones((2, 3), dtype=">f4"))
    np.testing.assert_array_equal(open_activations(tmp_path / "b.npz").rows("b", 0, 2).numpy(), np.ones((2, 3)))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({}, "holds no sites"),
        (
            {"a": np.ones((3, 2)), "b": np.ones((3, 2)), "c": np.ones((4, 2))},
            "unpaired: .* 3 inputs, but 'c' has 4",
        ),
        ({"a": np.ones(3)}, r"'a' has shape \(3,\).*reshape\(-1, 1\)"),
        ({"a": np.array([[1], [{}]], dtype=object)}, "array of objects.*unpickling"),
        ({"a": np.ones((3, 2), dtype=int)}, "holds int64; activations are floating-point"),
        ({"a": np.ones((0, 2))}, "holds no inputs"),
        ({"a": np.ones((3, 2), dtype=np.longdouble)}, "which torch lacks"),
        ({"a": np.ones((3, 2), dtype="m8[s]")}, "holds timedelta64"),
        ({"a": np.ones((3, 2), dtype=[("u", float)])}, "activations are floating-point"),
        ({"a": np.ones((3, 2), dtype=complex)}, "holds complex128; activations are floating-point"),
    ],
)
@pytest.mark.parametrize("on_disk", [False, True])
def test_arrays_that_cannot_be_compared_are_refused(arrays, says, on_disk, tmp_path):
    source = arrays
    if on_disk:
        source = tmp_path / "a.npz"
        np.savez(source, **arrays)
    with pytest.raises(ValueError, match=says):
        open_activations(source)


def test_values_that_are_no_arrays_are_refused():
    with pytest.raises(ValueError, match="'a' holds a list"):
        open_activations({"a": [[1.0, 2.0]]})


@pytest.mark.parametrize("how", ["npz", "compressed", "safetensors"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.99])
def test_files_that_were_cut_off_are_named(how, keep, arrays, tmp_path):
    path = write(tmp_path / f"a.{'safetensors' if how == 'safetensors' else 'npz'}", arrays, how)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(DamagedFile, match=r"a\.(npz|safetensors) is not a whole"):
        open_activations(path)


def test_a_damaged_member_is_named(tmp_path, arrays):
    path = write(tmp_path / "a.npz", arrays, "npz")
    whole = bytearray(path.read_bytes())
    at = whole.find(b"NUMPY")
    whole[at : at + 5] = b"WRONG"
    path.write_bytes(bytes(whole))
    with pytest.raises(DamagedFile, match=r"a\.npz is not a whole \.npz"):
        open_activations(path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.pt", "may run code when it is read"),
        ("a.PKL", "may run code when it is read"),
        ("a.npy", "one array without a site name"),
        ("a.csv", ".npz or .safetensors files, not .csv"),
        ("a", "not this"),
    ],
)
def test_other_files_are_refused_unread(name, says, tmp_path):
    path = tmp_path / name
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match=says):
        open_activations(path)


def test_a_pickle_called_npz_is_not_loaded(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(pickle.dumps({"a": np.ones((2, 2))}))
    with pytest.raises(DamagedFile, match=r"not a whole \.npz"):
        open_activations(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*a\.npz"):
        open_activations(tmp_path / "a.npz")


def test_sites_are_chosen_by_name_and_glob() -> None:
    saved = open_activations({name: np.eye(4) for name in ("conv1", "conv2", "fc")})
    assert [site.label for site in saved.select(["fc", "conv*"])] == ["conv1", "conv2", "fc"]
    assert [site.label for site in saved.select("fc")] == ["fc"]
    with pytest.raises(ValueError, match="did you mean 'conv1'"):
        saved.select(["convv1"])
    with pytest.raises(SiteError, match="by name or glob"):
        saved.select([int])


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_compressed_archive_is_read_row_by_row(tmp_path, order):
    import tracemalloc

    whole = np.asarray(np.random.default_rng(0).normal(size=(3000, 50)).round(1), order=order)
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros((40_000, 200)), b=whole)
    with pytest.raises(ValueError, match="unpaired"):
        open_activations(tmp_path / "a.npz")
    np.savez_compressed(tmp_path / "b.npz", b=whole)
    opened = open_activations(tmp_path / "b.npz")
    for start, stop in ((0, 100), (100, 250), (250, 3000), (10, 20), (10, 20), (2000, 2001)):
        np.testing.assert_array_equal(opened.rows("b", start, stop).numpy(), whole[start:stop])
    np.savez_compressed(tmp_path / "c.npz", c=np.zeros((40_000, 200)))  # 64 MB
    tracemalloc.start()
    found = open_activations(tmp_path / "c.npz").rows("c", 0, 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.shape == (100, 200)
    assert peak < 4_000_000


def test_a_large_array_that_can_only_be_read_whole_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros((50, 40), order="F"))
    monkeypatch.setattr("sosie.capture.saved.WHOLE", 1000)
    with pytest.raises(DamagedFile, match=r"a\.npz.*Fortran order.*ascontiguousarray"):
        open_activations(tmp_path / "a.npz")


def test_a_file_of_arrays_without_features_is_refused_by_its_site(tmp_path):
    np.savez(tmp_path / "a.npz", layer=np.zeros((8, 0)))
    with pytest.raises(SiteError, match=r"'layer' has shape .*, which is empty"):
        sosie.compare(tmp_path / "a.npz", tmp_path / "a.npz")
