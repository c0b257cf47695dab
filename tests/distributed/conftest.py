"""The processes that these tests share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace

import pytest
from conftest import RUNNERS, Runner
from ranks import Pool, Runs


@pytest.fixture(params=RUNNERS, ids=str)
def runner(request: pytest.FixtureRequest) -> Runs:
    """Every backend that this process can run, for the ranks to enter; of one architecture, which saves compiling."""
    runner: Runner = request.param
    return astuple(replace(runner, arch=90).chosen(request.node.name))


@pytest.fixture(scope="module")  # not longer: idle ranks keep a CPU busy
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
