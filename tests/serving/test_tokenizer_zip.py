"""The archive of tokenizer files: what is in it, and its limits."""

import io
import zipfile

import pytest

from serving.rpc import tokenizer_zip
from serving.rpc.tokenizer_zip import PIECE_BYTES, pack


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def names(packed) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(packed.data)).namelist()


def test_only_files_of_the_contract_go_along(folder):
    for name in ("model.safetensors", "modeling.py", "chat_template.jinja", "notes.txt"):
        (folder / name).write_text("x")
    (folder / "dspark").mkdir()
    assert names(pack(folder)) == ["chat_template.jinja", "config.json", "tokenizer.json"]


def test_equal_files_give_equal_bytes(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for name in ("config.json", "tokenizer.json"):
        (other / name).write_text("{}")
    assert pack(folder) == pack(other)


def test_a_link_into_a_cache_is_followed(folder, tmp_path_factory):
    blob = tmp_path_factory.mktemp("blobs") / "abc"
    blob.write_text("{}")
    (folder / "generation_config.json").symlink_to(blob)
    assert "generation_config.json" in names(pack(folder))


def test_pieces_are_the_archive_in_order(folder):
    noise = bytes(range(256)) * 1000
    (folder / "special_tokens_map.json").write_bytes(noise)
    packed = pack(folder)
    packed = tokenizer_zip.TokenizerZip(data=packed.data + noise, sha256=packed.sha256)
    pieces = list(packed.pieces())
    assert b"".join(pieces) == packed.data
    assert {len(piece) for piece in pieces[:-1]} == {PIECE_BYTES}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError) as error:
        pack(tmp_path)
    assert str(error.value) == f"{tmp_path.name} has no tokenizer.json"


def test_what_the_gateway_would_not_take_is_not_packed(folder):
    with pytest.raises(ValueError) as error:
        pack(folder, max_unpacked_bytes=3)
    assert "have 4 bytes, at most 3" in str(error.value)
    for number in range(tokenizer_zip.MAX_ENTRIES - 1):
        (folder / f"{number}.jinja").write_text("x")
    with pytest.raises(ValueError) as error:
        pack(folder)
    assert "has 51 tokenizer and template files, at most 50" in str(error.value)
