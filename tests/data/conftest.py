from types import SimpleNamespace

import pytest

from scalesteer.data import store


@pytest.fixture
def folder(tmp_path, originals):
    """A directory of links to the original MNIST files, for spoiling one of them."""
    directory = tmp_path / "files"
    directory.mkdir()
    for path in (originals / "mnist").iterdir():
        (directory / path.name).symlink_to(path)

    def spoil(name: str, content: bytes) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).write_bytes(content)

    return SimpleNamespace(path=directory, spoil=spoil)


@pytest.fixture
def digest_of():
    """The digest of built parts, from the arrays themselves."""

    def digest(parts):
        arrays = {f"{part}/{name}": array for part in parts for name, array in vars(parts[part]).items()}
        return store.combined_digest({name: store.array_digest(array) for name, array in arrays.items()})

    return digest
