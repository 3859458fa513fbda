"""Fixtures of all tests of the command."""

import shutil

import pytest
from typer.testing import CliRunner

from stocache.tools.cli.app import app
from tests.support.records import FOLDER


@pytest.fixture
def run():
    """The command: call it with its arguments."""
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def clean():
    """Remove afterwards what a test leaves in the directory."""
    yield
    shutil.rmtree(FOLDER, ignore_errors=True)
