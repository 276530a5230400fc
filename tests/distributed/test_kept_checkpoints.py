"""The checkpoints of all releases are still loaded, to the last bit, and trained on."""

import functools
import json
import tarfile

import kept_checkpoints
import pytest

from megatron_dobb.version import __version__
from testbed import processes

VERSIONS = sorted(folder.name for folder in kept_checkpoints.FOLDER.iterdir())


@functools.cache
def expected(version):
    return json.loads((kept_checkpoints.FOLDER / version / "values.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each version's archive holds in each format."""

    @functools.cache
    def read(version):
        path = tmp_path_factory.mktemp(version)
        with tarfile.open(kept_checkpoints.FOLDER / version / kept_checkpoints.ARCHIVE) as archive:
            archive.extractall(path, filter="data")
        [results] = processes.run(1, kept_checkpoints.read_gpt, path)
        return results

    return read


def assert_continued(found, expected):
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, (shape, dtype, total, digest) in expected["tensors"].items():
        assert found["tensors"][name][:2] == [shape, dtype], name
        assert found["tensors"][name][2] == pytest.approx(total, rel=1e-9, abs=1e-9), name
        assert found["tensors"][name][3] == digest, name
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3), "another processor rounds otherwise"


def test_this_version_is_among_the_kept_ones():
    assert f"version-{__version__}" in VERSIONS, f"write it once, as {kept_checkpoints.__name__} says"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sharding", kept_checkpoints.FORMATS)
def test_megatrons_checkpoints_of_every_release_are_loaded_to_the_last_bit_and_trained_on(version, sharding, found):
    assert_continued(found(version)[sharding], expected(version)["gpt"])


@pytest.mark.parametrize("version", VERSIONS)
def test_plain_states_of_every_release_are_loaded_to_the_last_bit_and_trained_on(version):
    assert_continued(
        kept_checkpoints.read_plain(kept_checkpoints.FOLDER / version / "plain.pt"), expected(version)["plain"]
    )
