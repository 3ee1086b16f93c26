from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sosie.data import open_data, open_images

Image = pytest.importorskip("PIL.Image", reason="image files need Pillow")


def picture(path: Path, shade: int = 0, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, (shade, 0, 255)[: len(mode)] if mode == "RGB" else shade).save(path)
    return path


def test_sub_folders_are_classes_and_names_are_sorted(tmp_path: Path) -> None:
    for name, shade in [("dog/b.png", 3), ("cat/z.png", 1), ("dog/a/c.png", 2)]:
        picture(tmp_path / name, shade)
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".hidden.png").touch()
    batches = open_data(f"folder:{tmp_path}", batch=2)
    assert (batches.total, len(batches), batches.name) == (3, 2, tmp_path.name)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert x.shape == (3, 3, 4, 6)
    assert (x[:, 0, 0, 0] * 255).round().tolist() == [1, 2, 3]
    assert y.tolist() == [0, 1, 1]
    images = open_images(f"folder:{tmp_path}")
    assert images.classes == ("cat", "dog")
    assert repr(images) == f"<ImageFolder {tmp_path}: 3 images of 2 classes>"
    assert repr(batches) == f"<DataBatches {tmp_path.name}: 3 inputs in batches of 2>"
    assert open_data(f"folder:{tmp_path}", max_rows=2).total == 2


def test_without_sub_folders_there_are_no_labels(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (x,) = open_data(f"folder:{tmp_path}")
    assert x.shape == (1, 3, 4, 6)


def test_the_size_and_the_mode_are_options(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", size=(20, 10))
    picture(tmp_path / "b.png", size=(3, 9), mode="L")
    (x,) = open_data(f"folder:{tmp_path}(size=5)")
    assert x.shape == (2, 3, 5, 5)
    (x,) = open_data(f"folder:{tmp_path}(size=5, mode='L')")
    assert x.shape == (2, 1, 5, 5)
    with pytest.raises(ValueError, match=r"b\.png is \(9, 3\), a\.png \(10, 20\).*size=224"):
        list(open_data(f"folder:{tmp_path}"))
    with pytest.raises(ValueError, match=r"b\.png"):
        list(open_data(f"folder:{tmp_path}", batch=1))


def test_the_centre_is_kept(tmp_path: Path) -> None:
    image = Image.new("L", (30, 10))
    image.paste(255, (10, 0, 20, 10))
    image.save(tmp_path / "a.png")
    (x,) = open_data(f"folder:{tmp_path}(size=10, mode='L')")
    assert x.min() == 1


def test_a_path_with_brackets(tmp_path: Path) -> None:
    picture(tmp_path / "set (1)" / "a.png")
    assert open_data(f"folder:{tmp_path / 'set (1)'}").total == 1
    assert open_data(f"folder:{tmp_path / 'set (1)'}(size=4)").source.size == 4


def test_unreadable_images_are_named(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"b\.png cannot be read as an image"):
        list(open_data(f"folder:{tmp_path}"))
    content = picture(tmp_path / "b.png", size=(200, 200)).read_bytes()
    (tmp_path / "b.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"b\.png cannot be read as an image"):
        list(open_data(f"folder:{tmp_path}(size=4)"))


def test_sixteen_bits_are_not_clipped_in_silence(tmp_path: Path) -> None:
    Image.new("I;16", (4, 4), 40_000).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="more than 8 bits"):
        list(open_data(f"folder:{tmp_path}"))


def test_links_do_not_lead_out(tmp_path: Path) -> None:
    outside = picture(tmp_path / "outside" / "secret.png")
    picture(tmp_path / "inside" / "a.png")
    (tmp_path / "inside" / "b.png").symlink_to(tmp_path / "inside" / "a.png")
    assert open_data(f"folder:{tmp_path / 'inside'}").total == 2
    (tmp_path / "inside" / "c.png").symlink_to(outside)
    with pytest.raises(ValueError, match=r"c\.png is a link that leads out"):
        open_data(f"folder:{tmp_path / 'inside'}")
    (tmp_path / "inside" / "c.png").unlink()
    (tmp_path / "inside" / "more").symlink_to(outside.parent)
    with pytest.raises(ValueError, match="link to a folder"):
        open_data(f"folder:{tmp_path / 'inside'}")


def test_misuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no images"):
        open_data(f"folder:{tmp_path}")
    picture(tmp_path / "a.png")
    picture(tmp_path / "class" / "b.png")
    with pytest.raises(ValueError, match="put every image into one"):
        open_data(f"folder:{tmp_path}")
    with pytest.raises(NotADirectoryError, match="does not exist"):
        open_data(f"folder:{tmp_path / 'nowhere'}")
    with pytest.raises(NotADirectoryError, match="is a file"):
        open_data(f"folder:{tmp_path / 'a.png'}")
    for options, message in [
        ("size=0", "size must be .* in pixels"),
        ("mode='P'", "'RGB', 'L', got 'P'"),
        ("sizes=3", "no option 'sizes'"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_data(f"folder:{tmp_path}({options})")
