"""Tests of preparation write thousands of small files, and the machine does not go down meanwhile."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
