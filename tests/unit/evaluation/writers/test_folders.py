"""Folders of links: every image once, images untouched, nothing of the user's removed."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from cdc_plugin.errors import UserError
from cdc_plugin.evaluation import writers
from cdc_plugin.evaluation.writers import folders
from tests.helpers.commands import read_table


def tree(folder) -> set[str]:
    return {
        os.path.relpath(os.path.join(parent, name), folder) for parent, _, files in os.walk(folder) for name in files
    }


def contents(folder) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in tree(folder)}


def no_symbolic_links(monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EPERM, "no symbolic links here")

    monkeypatch.setattr(os, "symlink", refuse)


def test_every_image_has_one_link_in_the_folder_of_its_cluster(tmp_path, images, plain_table):
    (tmp_path / "other").mkdir()
    before = contents(images)
    assert writers.write("folders", tmp_path / "sorted", [plain_table], images) == [tmp_path / "sorted" / "links.csv"]
    assert tree(tmp_path / "sorted") == {
        "links.csv",
        "cluster 00/b.PNG",
        "cluster 00/写真 Ä.jpg",
        "cluster 01/line\nbreak.png",
        "cluster 03/a.jpg",
        "cluster 03/a (2).jpg",
        'cluster 03/comma, "quotes" & <angle>\'.png',
        "cluster 11/100%#?+ $image.png",
    }
    assert contents(images) == before
    assert set(tmp_path.iterdir()) == {images, tmp_path / "sorted", tmp_path / "other"}
    assert (tmp_path / "sorted").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_unsure_images_and_outliers_have_their_own_folders_and_the_list_says_which_image_each_link_is(
    tmp_path, images, table
):
    writers.write("folders", tmp_path / "sorted", [table], images)
    assert tree(tmp_path / "sorted") >= {
        "cluster 03/a.jpg",
        'cluster 03/unsure/comma, "quotes" & <angle>\'.png',
        "cluster 01/unsure/line\nbreak.png",
        "outliers/100%#?+ $image.png",
    }
    rows = read_table(tmp_path / "sorted" / "links.csv")
    assert [row["path"] for row in rows] == table.path.tolist()
    for row in rows:
        link = tmp_path / "sorted" / row["link"]
        assert not os.path.isabs(os.readlink(link))
        assert link.samefile(images / row["path"])


def test_links_below_a_linked_folder_survive_moving_images_and_export_together(tmp_path, images, plain_table):
    (tmp_path / "all" / "deep").mkdir(parents=True)
    (tmp_path / "short").symlink_to(tmp_path / "all" / "deep")
    shutil.move(images, tmp_path / "all" / "photos")
    writers.write("folders", tmp_path / "short" / "sorted", [plain_table], tmp_path / "all" / "photos")
    shutil.move(tmp_path / "all", tmp_path / "elsewhere")
    link = tmp_path / "elsewhere/deep/sorted/cluster 03/a.jpg"
    assert link.samefile(tmp_path / "elsewhere/photos/a.jpg")


LONG = "x" * 251 + ".png"


@pytest.mark.parametrize(
    ("paths", "links"),
    [
        (["A.jpg", "sub/a.JPG"], {"A.jpg", "a (2).JPG"}),  # some file systems ignore case
        ([f"1/{LONG}", f"2/{LONG}"], {LONG, "x" * 247 + " (2).png"}),
        (["1/a.jpg", "a (2).jpg", "2/a.jpg"], {"a.jpg", "a (2).jpg", "a (3).jpg"}),
    ],
)
def test_names_that_are_alike_stay_apart(tmp_path, images, plain_table, paths, links):
    plain_table["path"][: len(paths)] = paths
    plain_table["cluster"][: len(paths)] = 5
    writers.write("folders", tmp_path / "sorted", [plain_table], images)
    assert set(os.listdir(tmp_path / "sorted" / "cluster 05")) == links


def test_hard_links_are_made_where_there_are_no_symbolic_ones(tmp_path, images, plain_table, monkeypatch):
    no_symbolic_links(monkeypatch)
    writers.check_source("folders", str(images), tmp_path / "sorted")
    writers.write("folders", tmp_path / "sorted", [plain_table], images)
    link = tmp_path / "sorted/cluster 03/a.jpg"
    assert not link.is_symlink()
    assert link.samefile(images / "a.jpg")
    writers.choose_format("folders", tmp_path / "sorted", overwrite=True)
    writers.write("folders", tmp_path / "sorted", [plain_table], images)
    assert (images / "a.jpg").stat().st_nlink == 2


def test_a_place_without_any_links_and_one_among_the_images_are_refused_before_work(tmp_path, images, monkeypatch):
    for inside in (".", "sorted", "sub/sorted"):
        with pytest.raises(UserError, match="more images"):
            writers.check_source("folders", str(images), images / inside)
    no_symbolic_links(monkeypatch)
    monkeypatch.setattr(os, "link", os.symlink)
    with pytest.raises(UserError, match="disk that holds the images"):
        writers.check_source("folders", str(images), tmp_path / "sorted")
    assert list(tmp_path.iterdir()) == [images]


def test_an_empty_folder_is_taken_and_overwrite_replaces_an_earlier_export_whole(tmp_path, images, plain_table):
    (tmp_path / "sorted").mkdir()
    writers.choose_format("folders", tmp_path / "sorted", overwrite=False)
    writers.write("folders", tmp_path / "sorted", [plain_table], images)
    with pytest.raises(UserError, match="--overwrite"):
        writers.choose_format("folders", tmp_path / "sorted", overwrite=False)
    writers.choose_format("folders", tmp_path / "sorted", overwrite=True)
    plain_table["cluster"][:] = 2
    writers.write("folders", tmp_path / "sorted", [plain_table], images)
    assert sorted(os.listdir(tmp_path / "sorted")) == ["cluster 02", "links.csv"]
    assert set(tmp_path.iterdir()) == {images, tmp_path / "sorted"}
    assert len(tree(images)) == 7


@pytest.mark.parametrize("change", ["new file", "moved link", "link replaced by a file", "no list", "a pipe"])
def test_overwrite_refuses_a_folder_that_holds_anything_else(tmp_path, images, plain_table, change):
    out = tmp_path / "sorted"
    writers.write("folders", out, [plain_table], images)
    if change == "new file":
        (out / "cluster 00" / "notes.txt").write_text("mine")
    elif change == "moved link":  # somebody has sorted by hand
        (out / "cluster 03" / "a.jpg").rename(out / "cluster 00" / "a.jpg")
    elif change == "link replaced by a file":
        (out / "cluster 03" / "a.jpg").unlink()
        (out / "cluster 03" / "a.jpg").write_text("mine")
    else:
        (out / "links.csv").unlink()
        if change == "a pipe":
            os.mkfifo(out / "links.csv")
    before = tree(out)
    with pytest.raises(UserError, match="no export made"):
        writers.choose_format("folders", out, overwrite=True)
    with pytest.raises(UserError, match="no export made"):
        writers.write("folders", out, [plain_table], images)
    assert tree(out) == before


def test_photos_a_file_or_a_link_in_the_place_of_the_folder_are_refused(tmp_path, images):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(images)
    for name, words in ((images.name, "no export made"), ("file", "new folder"), ("link", "new folder")):
        with pytest.raises(UserError, match=words):
            writers.choose_format("folders", tmp_path / name, overwrite=True)


@pytest.mark.parametrize("name", [".", ".."])
def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch, name):
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty" / "inner")
    with pytest.raises(UserError, match="current folder"):
        writers.choose_format("folders", Path(name), overwrite=True)


@pytest.mark.parametrize("there_before", [False, True])
def test_breaking_off_leaves_what_was_there(tmp_path, images, plain_table, monkeypatch, there_before):
    if there_before:
        writers.write("folders", tmp_path / "sorted", [plain_table], images)
    before = tree(tmp_path)

    def full_disk(pointer, link):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "symlink", full_disk)
    with pytest.raises(UserError, match="No space left"):
        writers.write("folders", tmp_path / "sorted", [plain_table], images)
    assert tree(tmp_path) == before


def test_a_failed_rename_puts_the_earlier_export_back(tmp_path, images, plain_table, monkeypatch):
    writers.write("folders", tmp_path / "sorted", [plain_table], images)
    before, rename = tree(tmp_path), os.rename
    failures = iter([False, True, False])

    def second_fails(old, new):
        if next(failures):
            raise OSError(errno.EIO, "I/O error")
        rename(old, new)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(UserError, match="I/O error"):
        writers.write("folders", tmp_path / "sorted", [plain_table], images)
    assert tree(tmp_path) == before


def test_names_that_are_no_text_are_linked_and_can_be_replaced(tmp_path, images, odd_table):
    (images / odd_table.path[0]).write_bytes(b"")
    writers.write("folders", tmp_path / "sorted", [odd_table], images)
    writers.choose_format("folders", tmp_path / "sorted", overwrite=True)
    assert next(folders._find_foreign(tmp_path / "sorted"), None) is None
    assert (tmp_path / "sorted/cluster 03" / odd_table.path[0]).is_file()


def test_new_kinds_have_their_own_folders_whether_outliers_or_not(tmp_path, images, table):
    from numpy.lib import recfunctions

    kinds = [0, 1, *[-1] * (len(table) - 2)]
    more = recfunctions.append_fields(table, "new_kind", kinds, usemask=False, asrecarray=True)
    writers.write("folders", tmp_path / "sorted", [more], images)
    links = {row["link"] for row in read_table(tmp_path / "sorted" / "links.csv")}
    assert sum(link.startswith("new kind 00/") for link in links) == 1
    assert sum(link.startswith("new kind 01/") for link in links) == 1
    assert len(links) == len(table)
